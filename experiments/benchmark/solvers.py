"""The prototypes of hyperspherical classification, spread over the sphere."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

import jaxloss
from experiments.benchmark.cases import SizeName
from experiments.benchmark.measure import Form, Row, measure

# (M, d, steps, steps that are timed, largest cosine of the prototypes that the authors published);
# a step of the last takes a hundred times as long.
SPREADS = {
    "paper": (
        (100, 16, 2000, 200, 0.326),
        (100, 32, 2000, 200, 0.246),
        (200, 50, 2000, 200, 0.205),
    ),
    "large": ((1000, 512, 200, 20, 0.156),),
}
_START, _END, _LEARNING_RATE = 2.0, 100.0, 0.01
_STEPS_THAT_AGREE = 10


def measure_spreads(size: SizeName, *, repeats: int) -> Iterator[Row]:
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
            measure(forms, repeats=repeats),
            {
                "steps": num_steps,
                "largest cosine": float(separation.largest_cosine),
                "bound": _bound(num, dim),
                "published": published,
            },
        )


def _bound(num_prototypes: int, dim: int) -> str:
    """A lower bound of the largest cosine of M unit vectors in d dimensions, and its name."""
    if num_prototypes <= dim + 1:
        return f"{-1 / (num_prototypes - 1):.3f} (simplex)"
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
