"""The data sets: TFDS builders of images whose splits differ in classes."""

from __future__ import annotations

from experiments.data.builders.few_shot import FewShotBuilder
from experiments.data.builders.icons.builder import Icons

__all__ = ["BUILDERS", "builder_class", "split_names"]

BUILDERS: dict[str, type[FewShotBuilder]] = {
    builder.name: builder
    for builder in (Icons,)
}
"""Every data set by its name."""


def builder_class(name: str) -> type[FewShotBuilder]:
    """The builder of a data set.

    Args:
        name: The data set.

    Returns:
        The class.

    Raises:
        ValueError: There is no such data set; the message lists those there are.
    """
    try:
        return BUILDERS[name]
    except KeyError:
        raise ValueError(f"no data set {name!r}; there are {', '.join(BUILDERS)}") from None


def split_names(name: str) -> tuple[str, ...]:
    """The splits of a data set, whether it is prepared or not.

    Args:
        name: The data set.

    Returns:
        `base`, `validation` where the data set has one, and `novel`.

    Raises:
        ValueError: There is no such data set.
    """
    return tuple(builder_class(name).FACTS.classes)
