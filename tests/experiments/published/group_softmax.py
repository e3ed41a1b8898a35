"""The published settings of protocol B, by preset; a copy that changes only with its source."""

from typing import Any

PUBLISHED: dict[str, dict[str, Any]] = {}
