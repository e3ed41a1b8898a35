"""The prototypes of hyperspherical classification: spreading and assigning them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

import jaxloss
from experiments.benchmark.cases import SizeName
from experiments.benchmark.measure import interleave

# The largest cosine of the prototypes that the authors have published, by (M, d).
PUBLISHED = {(100, 16): 0.326, (100, 32): 0.246, (200, 50): 0.205, (1000, 512): 0.156}

# (M, d, steps, steps that are timed); a step of the last takes a hundred times as long.
SPREADS = {
    "paper": ((100, 16, 2000, 200), (100, 32, 2000, 200), (200, 50, 2000, 200)),
    "large": ((1000, 512, 200, 20),),
}
# (classes, prototypes, d)
ASSIGNMENTS = {
    "paper": ((100, 100, 64), (200, 200, 50)),
    "large": ((1000, 1000, 512),),
}

_START, _END, _LEARNING_RATE = 2.0, 100.0, 0.01
_LOOP = "PyTorch's loop"
_STEPS_THAT_AGREE = 10
_TOLERANCE = 1e-3


def measure_spreads(size: SizeName, *, repeats: int) -> list[dict[str, Any]]:
    """`uniform_prototypes` and the loop in PyTorch: time, and largest cosine beside its bound."""
    return [_measure_spread(*spread, repeats=repeats) for spread in SPREADS.get(size, ())]


def measure_assignments(size: SizeName, *, repeats: int) -> list[dict[str, Any]]:
    """`assign_prototypes` against scipy's solver, each with the matrix of cosines."""
    return [
        _measure_assignment(*shape, trained=trained, repeats=repeats)
        for shape in ASSIGNMENTS.get(size, ())
        for trained in (True, False)
    ]


SOLVERS: dict[str, Callable[..., list[dict[str, Any]]]] = {
    "uniform_prototypes": measure_spreads,
    "assign_prototypes": measure_assignments,
}


def _bound(num_prototypes: int, dim: int) -> tuple[str, float]:
    """Name and value of a lower bound of the largest cosine of M unit vectors in d dimensions."""
    if num_prototypes <= dim + 1:
        return "simplex", -1 / (num_prototypes - 1)
    if num_prototypes <= 2 * dim:
        return "orthoplex", 0.0
    return "Welch", math.sqrt((num_prototypes - dim) / (dim * (num_prototypes - 1)))


def _torch_prototypes(start: np.ndarray, num_steps: int) -> np.ndarray:
    """The loop of `uniform_prototypes` as PyTorch's users write it, from the columns `start`."""
    import torch
    import torch.nn.functional as F

    device = "cuda" if torch.cuda.is_available() else "cpu"
    prototypes = torch.nn.Parameter(torch.tensor(start.T, device=device))
    num = len(prototypes)
    optimizer = torch.optim.Adam([prototypes], lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    itself = torch.eye(num, dtype=torch.bool, device=device)
    growth = (_END / _START) ** (1 / max(num_steps - 1, 1))
    for step in range(num_steps):
        optimizer.zero_grad()
        units = F.normalize(prototypes)
        logits = 2 * _START * growth**step * (units @ units.T)
        loss = num / 2 * logits.masked_fill(itself, -torch.inf).flatten().logsumexp(0)
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            prototypes.copy_(F.normalize(prototypes))
    return prototypes.detach().cpu().numpy().T


def _measure_spread(
    num_prototypes: int, dim: int, num_steps: int, num_timed: int, *, repeats: int
) -> dict[str, Any]:
    key = jax.random.key(0)
    ours = partial(jaxloss.uniform_prototypes, key, num_prototypes, dim)
    separation = jaxloss.prototype_separation(ours(num_steps=num_steps))
    runs: dict[str, Callable[[], Any]] = {
        "jaxloss": lambda: jax.block_until_ready(ours(num_steps=num_timed))
    }
    failures = {}
    if importlib.util.find_spec("torch"):
        start = np.asarray(jax.random.normal(key, (dim, num_prototypes), jnp.float32))
        start = start / np.linalg.norm(start, axis=0)
        few = np.asarray(ours(num_steps=_STEPS_THAT_AGREE))
        difference = np.max(np.abs(_torch_prototypes(start, _STEPS_THAT_AGREE) - few))
        if difference <= _TOLERANCE:
            runs[_LOOP] = partial(_torch_prototypes, start, num_timed)
        else:
            text = f"differs by {difference:.1g} after {_STEPS_THAT_AGREE} steps"
            failures[_LOOP] = {"failure": text}
    kind, limit = _bound(num_prototypes, dim)
    return {
        "problem": {"M": num_prototypes, "d": dim, "steps timed": num_timed},
        "forms": interleave(runs, repeats=repeats, seconds=8.0) | failures,
        "result": {
            "steps": num_steps,
            "largest cosine": float(separation.largest_cosine),
            "bound": f"{limit:.3f} ({kind})",
            "published": PUBLISHED.get((num_prototypes, dim)),
        },
    }


def _measure_assignment(
    num_classes: int, num_prototypes: int, dim: int, *, trained: bool, repeats: int
) -> dict[str, Any]:
    """Trained class means are near a prototype each, as after some epochs; others are random."""
    rng = np.random.default_rng(0)
    prototypes = rng.normal(size=(dim, num_prototypes)).astype(np.float32)
    prototypes /= np.linalg.norm(prototypes, axis=0)
    means = rng.normal(size=(dim, num_classes)).astype(np.float32) / math.sqrt(dim)
    if trained:
        means += prototypes[:, rng.permutation(num_prototypes)[:num_classes]]
    means /= np.linalg.norm(means, axis=0)
    placed = jax.device_put(means), jax.device_put(prototypes)

    ours = jax.jit(jaxloss.assign_prototypes)
    runs: dict[str, Callable[[], Any]] = {
        "jaxloss": lambda: jax.block_until_ready(ours(*placed)),
        "scipy": lambda: linear_sum_assignment(means.T @ prototypes, maximize=True)[1],
    }
    cosines = means.T.astype(np.float64) @ prototypes
    classes = np.arange(num_classes)
    totals = {name: float(cosines[classes, np.asarray(run())].sum()) for name, run in runs.items()}
    best = max(totals.values())
    return {
        "problem": {
            "classes": num_classes,
            "prototypes": num_prototypes,
            "d": dim,
            "means": "trained" if trained else "random",
        },
        "forms": interleave(runs, repeats=repeats, seconds=5.0),
        "result": {},
        "totals": totals,
        "agree": all(best - total <= _TOLERANCE * abs(best) for total in totals.values()),
    }
