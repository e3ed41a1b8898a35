"""What pictures are drawn from: the images of a run's splits, and what it computes for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.config import DataConfig, Folders
from experiments.contracts import ImageSet, Outputs, Photographs
from experiments.data.augment import center_crops
from experiments.evaluation.feature_space import class_membership, class_order, class_similarity
from experiments.reporting.style import BLUE, VERMILLION
from experiments.runs import RestoredRun
from experiments.training.step import build_outputs

MOST_IMAGES = 10_000
"""Training images whose features are computed, and images of the shown split among which a map and
neighbours choose; of more, a random part."""


@dataclass(frozen=True, eq=False)
class Side:
    """The images of one split, and what the run computes for them."""

    split: str
    images: ImageSet
    outputs: Outputs
    data: DataConfig
    """The options by which photographs of different sizes are cropped."""
    color: str
    """The same in all pictures."""

    def read(self, rows: Any) -> np.ndarray:
        """The images uint8 [n, h, w, c] of rows [n]; grey ones are light on dark."""
        images = self.images.images[np.asarray(rows)]
        if isinstance(images, Photographs):
            images = np.asarray(jnp.round(center_crops(images, self.data)).astype(jnp.uint8))
        return 255 - images if self.is_dark_on_light else images

    @cached_property
    def is_dark_on_light(self) -> bool:
        """Whether images are grey and have a light ground, by the borders of some of them."""
        table = self.images.images
        if table.shape[-1] != 1:
            return False
        some = table[np.linspace(0, len(table) - 1, 100).astype(int)]
        edges = (some[:, 0], some[:, -1], some[:, :, 0], some[:, :, -1])
        return bool(np.median(np.concatenate(edges, axis=1)) >= 128)

    @property
    def is_multi_label(self) -> bool:
        """Whether an image has any number of labels."""
        return self.outputs.labels.ndim == 2

    @property
    def noun(self) -> str:
        """What its classes are called."""
        return "labels" if self.is_multi_label else "classes"

    @cached_property
    def membership(self) -> np.ndarray:
        """Whether an image has a label: bool [n, C]."""
        return class_membership(self.outputs.labels, len(self.images.class_names))

    @cached_property
    def similar_classes(self) -> tuple[np.ndarray, np.ndarray]:
        """The classes [k] with an image, similar ones side by side, and their cosines [k, k]."""
        present = np.flatnonzero(self.membership.any(0))
        cosines = class_similarity(self.outputs.features, self.membership[:, present])
        order = class_order(cosines)
        return present[order], cosines[np.ix_(order, order)]

    def names_of(self, classes: Iterable[int]) -> list[str]:
        """The names of classes."""
        return [self.images.class_names[c] for c in classes]


class View(NamedTuple):
    """What pictures are drawn from."""

    run: RestoredRun
    folder: Path
    """Run directory."""
    sides: Sequence[Side]
    """The training images, if another split was requested, and the requested split, whole."""
    notes: Sequence[str]
    """Which pictures show a part of the images."""

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
    protocol, data = run.plan.protocol, run.plan.config.data
    sides, notes = [], []
    outputs_of = build_outputs(run.graphdef, run.objective, data, run.class_counts)
    for name in dict.fromkeys((protocol.splits[0], split)):
        images = protocol.load(folders, name)
        if (count := len(images.labels)) > MOST_IMAGES:
            drawn = "map and neighbours" if name == split else "pictures"
            part = f"{drawn} show a random part of {MOST_IMAGES:,}"
            notes.append(f"The {name} split has {count:,} images; {part}.")
        images = images if name == split else part_of(images)
        color = BLUE if name == protocol.splits[0] else VERMILLION
        sides.append(Side(name, images, outputs_of(run.state, images), data, color))
    return View(run, folder, sides, notes)


def some_rows(count: int) -> np.ndarray:
    """All rows of so many images, or a random part of `MOST_IMAGES`: int64, ascending."""
    return np.sort(np.random.default_rng(0).permutation(count)[:MOST_IMAGES])


def part_of(images: ImageSet) -> ImageSet:
    """The images of `some_rows`; they are read when they are indexed."""
    rows = some_rows(len(images.labels))
    return replace(images, images=_Rows(images.images, rows), labels=images.labels[rows])


class _Rows:
    """Some images of a table, which need not fit into memory."""

    def __init__(self, table: Any, rows: np.ndarray):
        self.table, self.rows, self.shape = table, rows, (len(rows), *table.shape[1:])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.table[self.rows[index]]
