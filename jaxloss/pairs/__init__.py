"""Pairwise losses of your own, in tiles and over devices: the engine of the library's losses.

`compare` compares a batch with itself or with references, `compare_towers` queries with keys. A
`Statistic` is a reduction (`LOGSUMEXP`, `MAX`, `MIN`, `ARGMAX`, `SUM`, `COUNT`) of
`value(pair, params)`; a loss is a formula of statistics. The similarities of a large batch are
never in memory at once.
"""

from jaxloss.pairs.comparison import Comparison, compare
from jaxloss.pairs.statistics import (
    ARGMAX,
    COUNT,
    LOGSUMEXP,
    MAX,
    MIN,
    SUM,
    ByClass,
    Pair,
    Statistic,
)
from jaxloss.pairs.towers import Towers, compare_towers

__all__ = [
    "ARGMAX",
    "COUNT",
    "LOGSUMEXP",
    "MAX",
    "MIN",
    "SUM",
    "ByClass",
    "Comparison",
    "Pair",
    "Statistic",
    "Towers",
    "compare",
    "compare_towers",
]
