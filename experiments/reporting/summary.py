"""The cells of a comparison, put in order and averaged over seeds.

A cell is one run, as a dict: `loss` (`sce`, `sce+nca`, `direct:sce+nca`, ...), `label` (`SCE⊕NCA`),
`sampling` (`random`, or `32x4` for N classes with K images each), `seed`, `seconds`, and `results`:
for each number of shots a dict of `shots`, `accuracy` and `interval` (fractions; half the width of
the 95 % confidence interval), `episodes` and `hash` (of the episode list). Where they are there,
`evaluation` (a dict of `ways`, `queries`, `distance`), `data`, `split`, `num_features`, `power` and
`command` are mentioned in captions. The cell of a run that diverged has no `results`, and
`diverged` tells what happened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from experiments.loss_names import parse_loss


def sampling_name(sampling: str) -> str:
    """A sampling strategy in words: `32-way 4-shot` for `32x4`."""
    parts = re.fullmatch(r"(\d+)x(\d+)", sampling)
    return f"{parts[1]}-way {parts[2]}-shot" if parts else f"{sampling} batch"


def summarize(cells: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each method and sampling, averaged over seeds.

    Args:
      cells: Runs, as the docstring of this module describes them.

    Returns:
      Dicts of `loss`, `label`, `family`, `sampling`, `seeds`, `seconds` (of all seeds together) and
      `results`: for each number of shots the mean `accuracy`, the mean `interval`, the `spread`
      (largest minus smallest accuracy over seeds; None for a single seed), the `accuracies` of the
      seeds, and the `episodes` and `hashes` met; `diverged` has the seeds of the runs that
      diverged, which no mean takes in. Methods come family by family, then in the order
      of `cells`; samplings by falling number of classes, random batches last.

    Raises:
      ValueError: Two cells have the same method, sampling and seed.
    """
    groups: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for cell in cells:
        group = groups.setdefault((cell["loss"], cell["sampling"]), {})
        if cell["seed"] in group:
            raise ValueError(
                f"two cells for {cell['loss']}, sampling {cell['sampling']}, seed {cell['seed']}"
            )
        group[cell["seed"]] = cell
    losses = list(dict.fromkeys(loss for loss, _ in groups))
    losses.sort(key=lambda loss: parse_loss(loss).order[0])
    samplings = sorted({sampling for _, sampling in groups}, key=sampling_order)
    return [
        _summary([group[seed] for seed in sorted(group)])
        for loss in losses
        for sampling in samplings
        if (group := groups.get((loss, sampling)))
    ]


def sampling_order(sampling: str) -> tuple[int, int, str]:
    """Sort key of samplings: by falling number of classes, random batches last."""
    parts = re.fullmatch(r"(\d+)x(\d+)", sampling)
    return (0, -int(parts[1]), sampling) if parts else (1, 0, sampling)


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    first = runs[0]
    shots = sorted({result["shots"] for run in runs for result in run["results"]})
    results = []
    for shot in shots:
        found = [r for run in runs for r in run["results"] if r["shots"] == shot]
        accuracies = [r["accuracy"] for r in found]
        results.append(
            {
                "shots": shot,
                "accuracy": float(np.mean(accuracies)),
                "interval": float(np.mean([r["interval"] for r in found])),
                "spread": max(accuracies) - min(accuracies) if len(found) > 1 else None,
                "accuracies": accuracies,
                "episodes": sorted({r["episodes"] for r in found}),
                "hashes": sorted({str(r["hash"]) for r in found}),
            }
        )
    return {
        "loss": first["loss"],
        "label": first["label"],
        "family": parse_loss(first["loss"]).heading,
        "sampling": first["sampling"],
        "seeds": [run["seed"] for run in runs],
        "diverged": [run["seed"] for run in runs if "diverged" in run],
        "seconds": float(sum(run.get("seconds") or 0.0 for run in runs)),
        "results": results,
    }
