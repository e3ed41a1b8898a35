"""Pairwise losses of your own, in tiles and over devices: the engine of the library's losses.

`compare` compares a batch with itself or with references, `compare_towers` queries with keys. A
`Statistic` is a reduction (`LOGSUMEXP`, `MAX`, `SUM`, `SOFTPLUS`) of values of the pairs; a loss is
a formula of statistics. The similarities of a large batch are never in memory at once.
"""

from jaxloss.pairs.comparison import Comparison, Towers, compare, compare_towers
from jaxloss.pairs.statistics import LOGSUMEXP, MAX, SOFTPLUS, SUM, ByClass, Statistic

__all__ = [
    "LOGSUMEXP",
    "MAX",
    "SOFTPLUS",
    "SUM",
    "ByClass",
    "Comparison",
    "Statistic",
    "Towers",
    "compare",
    "compare_towers",
]
