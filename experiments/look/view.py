"""What pictures are drawn from: the images of a run's splits, and what it computes for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.config import DataConfig, Folders
from experiments.contracts import ImageSet, Outputs, Photographs
from experiments.data.augment import center_crops
from experiments.evaluation.feature_space import class_membership
from experiments.reporting.style import BLUE, VERMILLION
from experiments.runs import RestoredRun
from experiments.training.step import build_outputs

MOST_IMAGES = 10_000
"""Training images whose features are computed, and images of the shown split among which a map and
neighbours choose; of more, a random part."""


class Side(NamedTuple):
    """The images of one split, and what the run computes for them."""

    split: str
    images: ImageSet
    outputs: Outputs
    available: int
    """Images of the whole split; of many training images, only a part is here."""
    inverted: bool
    """Whether images are drawn as their negatives, so that grey ones are light on dark."""
    data: DataConfig
    """The options by which photographs of different sizes are cropped."""
    color: str
    """The same in all pictures."""

    def read(self, rows: Any) -> np.ndarray:
        """The images uint8 [n, h, w, c] of rows [n], as they are drawn."""
        images = self.images.images[np.asarray(rows)]
        if isinstance(images, Photographs):
            images = np.asarray(jnp.round(center_crops(images, self.data)).astype(jnp.uint8))
        return 255 - images if self.inverted else images

    @property
    def is_multi_label(self) -> bool:
        """Whether an image has any number of labels."""
        return self.outputs.labels.ndim == 2

    @property
    def noun(self) -> str:
        """What its classes are called."""
        return "labels" if self.is_multi_label else "classes"

    @property
    def membership(self) -> np.ndarray:
        """Whether an image has a label: bool [n, C]."""
        return class_membership(self.outputs.labels, len(self.images.class_names))

    def names_of(self, classes: Iterable[int]) -> list[str]:
        """The names of classes."""
        return [self.images.class_names[c] for c in classes]

    def label_names(self, membership: np.ndarray) -> str:
        """The names of an image's labels, bool [C]."""
        return ", ".join(self.names_of(np.flatnonzero(membership)))


class View(NamedTuple):
    """What pictures are drawn from."""

    run: RestoredRun
    folder: Path
    """Run directory."""
    sides: Sequence[Side]
    """The training images, if another split was requested, and the requested split, whole."""

    @property
    def shown(self) -> Side:
        """The requested split."""
        return self.sides[-1]

    @property
    def holds_classes_out(self) -> bool:
        """Whether the classes of the evaluation are not those of training."""
        return "base" in self.run.plan.protocol.splits


def view_run(run: RestoredRun, folder: Path, folders: Folders, split: str) -> View:
    """What the pictures of a split are drawn from; raises a `DivergedError`.

    The numbers of the requested split are those of the evaluation, which uses every image.
    """
    protocol, data, sides = run.plan.protocol, run.plan.config.data, []
    outputs_of = build_outputs(run.network.graphdef, run.network.objective, data, run.class_counts)
    for name in dict.fromkeys((protocol.splits[0], split)):
        whole = protocol.load(folders, name)
        images = whole if name == split else part_of(whole)
        some = np.linspace(0, len(images.labels) - 1, min(100, len(images.labels))).astype(int)
        dark = is_dark_on_light(images.images[some])
        color = BLUE if name == protocol.splits[0] else VERMILLION
        outputs = outputs_of(run.state, images)
        sides.append(Side(name, images, outputs, len(whole.labels), dark, data, color))
    return View(run, folder, sides)


def is_dark_on_light(images: np.ndarray) -> bool:
    """Whether grey images uint8 [n, h, w, 1] have a light ground, by their borders."""
    if images.shape[-1] != 1:
        return False
    sides = (images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1])
    return bool(np.median(np.concatenate(sides, axis=1)) >= 128)


def some_rows(count: int) -> np.ndarray:
    """All rows of so many images, or a random part of `MOST_IMAGES`: int64, ascending."""
    return np.sort(np.random.default_rng(0).permutation(count)[:MOST_IMAGES])


def part_of(images: ImageSet) -> ImageSet:
    """The images of `some_rows`; they are read when they are indexed."""
    rows = some_rows(len(images.labels))
    return replace(images, images=_Rows(images.images, rows), labels=images.labels[rows])


class _Rows:
    """Some images of a table."""

    def __init__(self, table: Any, rows: np.ndarray):
        self.table, self.rows, self.shape = table, rows, (len(rows), *table.shape[1:])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.table[self.rows[index]]
