"""The prototypes of hyperspherical classification: spreading and assigning them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment

import jaxloss
from experiments.benchmark.cases import SizeName
from experiments.benchmark.measure import Form, Row, measure

# (M, d, steps, steps that are timed, largest cosine of the prototypes that the authors published)
SPREADS = {
    "paper": (
        (100, 16, 2000, 200, 0.326),
        (100, 32, 2000, 200, 0.246),
        (200, 50, 2000, 200, 0.205),
    ),
    "large": ((1000, 512, 200, 20, 0.156),),
}
# (number of classes and of prototypes, d)
ASSIGNMENTS = {"paper": ((100, 64), (200, 50)), "large": ((1000, 512),)}

_START, _END, _LEARNING_RATE = 2.0, 100.0, 0.01
_STEPS_THAT_AGREE = 10


def measure_spreads(size: SizeName) -> Iterator[Row]:
    """`uniform_prototypes` and the loop in PyTorch: time, and largest cosine beside its bound."""
    for num, dim, num_steps, num_timed, published in SPREADS.get(size, ()):
        key = jax.random.key(0)
        ours = partial(jaxloss.uniform_prototypes, key, num, dim)
        start = np.asarray(jax.random.normal(key, (dim, num), jnp.float32))
        theirs = partial(_torch_prototypes, start / np.linalg.norm(start, axis=0))
        forms = {
            "jaxloss": Form(
                lambda ours=ours, steps=num_timed: jax.block_until_ready(ours(num_steps=steps)),
                [ours(num_steps=_STEPS_THAT_AGREE)],
            ),
            "PyTorch's loop": Form(partial(theirs, num_timed), [theirs(_STEPS_THAT_AGREE)]),
        }
        separation = jaxloss.prototype_separation(ours(num_steps=num_steps))
        yield Row(
            "uniform_prototypes",
            {"M": num, "d": dim, "steps timed": num_timed},
            measure(forms, few=True),
            {
                "steps": num_steps,
                "largest cosine": float(separation.largest_cosine),
                "bound": _bound(num, dim),
                "published": published,
            },
        )


def measure_assignments(size: SizeName) -> Iterator[Row]:
    """`assign_prototypes` against scipy's solver, each with the matrix of cosines."""
    for num, dim in ASSIGNMENTS.get(size, ()):
        rng = np.random.default_rng(0)
        prototypes = rng.normal(size=(dim, num)).astype(np.float32)
        prototypes /= np.linalg.norm(prototypes, axis=0)
        noise = rng.normal(size=(dim, num)).astype(np.float32) / math.sqrt(dim)
        # Trained class means are near a prototype each, as after some epochs.
        near = noise + prototypes[:, rng.permutation(num)]
        for kind, means in (("trained", near), ("random", noise)):
            forms = _assignment_forms(means / np.linalg.norm(means, axis=0), prototypes)
            problem = {"classes": num, "d": dim, "means": kind}
            yield Row("assign_prototypes", problem, measure(forms, few=True), {})


def _assignment_forms(means: np.ndarray, prototypes: np.ndarray) -> dict[str, Form]:
    placed, ours = jax.device_put((means, prototypes)), jax.jit(jaxloss.assign_prototypes)
    runs = {
        "jaxloss": lambda: jax.block_until_ready(ours(*placed)),
        "scipy": lambda: linear_sum_assignment(means.T @ prototypes, maximize=True)[1],
    }
    cosines = means.T.astype(np.float64) @ prototypes
    # Several assignments may have the largest sum of cosines.
    return {
        name: Form(run, [cosines[np.arange(len(cosines)), np.asarray(run())].sum()])
        for name, run in runs.items()
    }


def _bound(num_prototypes: int, dim: int) -> str:
    """A lower bound of the largest cosine of M > d + 1 unit vectors in d dimensions, by name."""
    if num_prototypes <= 2 * dim:
        return "0.000 (orthoplex)"
    bound = math.sqrt((num_prototypes - dim) / (dim * (num_prototypes - 1)))
    return f"{bound:.3f} (Welch)"


def _torch_prototypes(start: np.ndarray, num_steps: int) -> np.ndarray:
    """The loop of `uniform_prototypes` as PyTorch's users write it, from the columns `start`."""
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
