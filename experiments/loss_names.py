"""The names of losses: what the command line takes and what tables show."""

from __future__ import annotations

from typing import Literal, NamedTuple, cast

from experiments.errors import ConfigError

Family = Literal["classification", "metric", "sum", "direct", "spectral"]

FAMILIES: dict[Family, str] = {
    "classification": "Classification",
    "metric": "Metric",
    "sum": "Sum",
    "direct": "Direct-sum",
    "spectral": "Spectral-sum",
}
"""Every family with its heading, in the order of the papers' tables."""

CLASSIFICATION_LOSSES = ("sce", "bce")
METRIC_LOSSES = ("nca", "proto")

_INTEGRATIONS = ("sum", "direct", "spectral")
_SHORT = {"sce": "SCE", "bce": "BCE", "nca": "NCA", "proto": "Proto"}
_OPERATORS = {"sum": "+", "direct": "⊕", "spectral": "⊕̃"}


class LossName(NamedTuple):
    """A parsed loss name: its family and its parts."""

    family: Family
    classification: str | None
    metric: str | None

    @property
    def label(self) -> str:
        """The name as the paper writes it."""
        first, second = self.classification, self.metric
        if first is None or second is None:
            return _SHORT[first or second or ""]
        return f"{_SHORT[first]}{_OPERATORS[self.family]}{_SHORT[second]}"

    @property
    def heading(self) -> str:
        """The family's heading, one of `FAMILIES`."""
        return FAMILIES[self.family]

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: family by family, and within one as the paper's tables do."""
        return (
            list(FAMILIES).index(self.family),
            (*CLASSIFICATION_LOSSES, None).index(self.classification),
            (*METRIC_LOSSES, None).index(self.metric),
        )


def parse_loss(name: str) -> LossName:
    """Reads `sce`, `nca`, `sce+nca` (a sum), `direct:sce+nca`, `spectral:sce+nca`.

    Raises:
      ConfigError: the name is none of these.
    """
    integration, colon, parts = name.rpartition(":")
    classification, plus, metric = parts.partition("+")
    if not plus and not colon:
        if parts in CLASSIFICATION_LOSSES:
            return LossName("classification", parts, None)
        if parts in METRIC_LOSSES:
            return LossName("metric", None, parts)
    integration = integration if colon else "sum"
    known = classification in CLASSIFICATION_LOSSES and metric in METRIC_LOSSES
    if plus and known and integration in _INTEGRATIONS:
        return LossName(cast(Family, integration), classification, metric)
    raise ConfigError(
        f"loss {name!r} is not known; single losses are "
        f"{', '.join([*CLASSIFICATION_LOSSES, *METRIC_LOSSES])}; "
        "joined ones are written sce+nca (sum), direct:sce+nca and spectral:sce+nca"
    )
