"""Pairwise losses of your own, in tiles and over devices: the engine of the library's losses.

`compare` compares a batch with itself or with references, `compare_towers` queries with keys. A
`Statistic` is a reduction (`LOGSUMEXP`, `MAX`, `MIN`, `SUM`, `COUNT`) of `value(pair, params)`; a
loss is a formula of statistics. The similarities of a large batch are never in memory at once.
"""

from jaxloss.pairs.comparison import Comparison, Towers, compare, compare_towers
from jaxloss.pairs.statistics import COUNT, LOGSUMEXP, MAX, MIN, SUM, ByClass, Pair, Statistic

__all__ = [
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
