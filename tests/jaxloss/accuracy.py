"""How far the losses are from their references: the tables of docs/accuracy.md.

    python -m tests.jaxloss.accuracy

measures the differences to PyTorch and writes docs/pytorch_differences.csv. The page shows that
file, because PyTorch need not be installed where the site is built. The other differences are
measured by the build.
"""

import csv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.jaxloss import harness
from tests.jaxloss.loss_table import EVERY_LOSS, LossRow

FILE = Path(__file__).parents[2] / "docs" / "pytorch_differences.csv"

ROWS = EVERY_LOSS


class Difference(NamedTuple):
    """Of a mean loss in float64 to one in PyTorch, relative to the largest number of each array."""

    loss: str
    options: str
    theirs: str
    """Empty for our own formula in PyTorch, `torch_references`."""
    source: str
    """The distribution and its version."""
    value: float
    gradient: float

    @property
    def key(self) -> tuple[str, str, str]:
        return self.loss, self.options, self.theirs


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference of two arrays, relative to the largest number of the second."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-30))


def largest(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    return max(map(difference, ours, theirs))


def rounded(number: float) -> str:
    """To one digit."""
    return f"{number:.0e}" if number else "0"


def release(distribution: str) -> str:
    """Its name and version, without the build."""
    return f"{distribution} {version(distribution).partition('+')[0]}"


def batch_of(row: LossRow) -> harness.Batch:
    """Random rows of which some are masked, ignored or weighted, exact in float32."""
    batch = harness.make_batch(row, seed=2)
    args = harness.rounded(batch.args, row.differentiable, np.float32)
    (weights,) = harness.rounded((batch.sample_weights,), (0,), np.float32)
    return batch._replace(args=args, sample_weights=weights)


def to_loop(row: LossRow) -> tuple[float, float, float]:
    """Of the values in float64 and float32 to the loop, and of the gradient in float32."""
    batch = batch_of(row)
    expected = harness.reference_values(row, batch)
    wide = harness.evaluate(row, batch, np.float64)
    single = harness.evaluate(row, batch, np.float32, row.reductions)
    return (
        max(difference(wide[key], expected[key]) for key in row.reductions),
        max(difference(single[key], expected[key]) for key in row.reductions),
        largest(single["mean_grad"], wide["mean_grad"]),
    )


def to_own_formula(row: LossRow) -> Difference:
    """To `torch_references`."""
    batch = batch_of(row)
    ours = harness.evaluate(row, batch, np.float64, ("mean",))
    theirs = harness.torch_values(row, batch, ("mean",))
    assert theirs is not None
    value = difference(ours["mean"], theirs["mean"])
    gradient = largest(ours["mean_grad"], theirs["mean_grad"])
    return Difference(row.function.__name__, "", "", release("torch"), value, gradient)


def evaluate_peer(peer: Any, dtype: Any) -> tuple[Any, Any]:
    """The value and the gradients of both: of ours in `dtype`, of theirs in float64."""
    import torch

    tensors = [torch.tensor(array, requires_grad=True) for array in peer.arrays]
    expected = peer.torch_value(*tensors)
    gradients = torch.autograd.grad(expected, tensors)
    positions = tuple(range(len(tensors)))
    with harness.precision(dtype):
        run = jax.jit(jax.value_and_grad(peer.value, positions), compiler_options=harness.QUICK)
        ours = harness.widen(run(*(jnp.asarray(array, dtype) for array in peer.arrays)))
    return ours, (expected.item(), tuple(gradient.numpy() for gradient in gradients))


def to_peer(peer: Any) -> Difference:
    """To the code of others."""
    (value, gradients), (their_value, their_gradients) = evaluate_peer(peer, np.float64)
    return Difference(
        peer.loss,
        peer.options,
        peer.theirs,
        release("pytorch-metric-learning"),
        difference(value, their_value),
        largest(gradients, their_gradients),
    )


def read() -> list[Difference]:
    """The differences that were measured last."""
    with FILE.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    return [
        Difference(loss, options, theirs, source, float(value), float(gradient))
        for loss, options, theirs, source, value, gradient in rows
    ]


def main() -> None:
    """Measures all differences to PyTorch."""
    from tests.jaxloss.test_peers import PEERS

    differences = [*map(to_own_formula, ROWS), *map(to_peer, PEERS)]
    with FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Difference._fields)
        for *texts, value, gradient in differences:
            writer.writerow([*texts, f"{value:.1e}", f"{gradient:.1e}"])


if __name__ == "__main__":
    main()
