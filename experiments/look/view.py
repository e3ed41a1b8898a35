"""What pictures are drawn from: the images of a run's splits, and what it computes for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.config import DataConfig, Folders, TrainConfig
from experiments.contracts import ImageSet, Outputs, Photographs, Protocol
from experiments.data.augment import center_crops
from experiments.evaluation.feature_space import class_membership
from experiments.look.tiles import OTHERS, TRAINED, is_dark_on_light
from experiments.restored import RestoredRun
from experiments.training.outputs import build_outputs

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
    """Whether images are drawn as their negatives: see `tile`."""
    data: DataConfig
    """The options by which photographs of different sizes are cropped."""

    def read(self, rows: Any) -> np.ndarray:
        """The images uint8 [..., h, w, c] of rows of any shape, as they are drawn."""
        rows = np.asarray(rows)
        images = self.images.images[rows.ravel()]
        if isinstance(images, Photographs):
            images = np.asarray(jnp.round(center_crops(images, self.data)).astype(jnp.uint8))
        images = images.reshape(*rows.shape, *images.shape[1:])
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


class View(NamedTuple):
    """What pictures are drawn from."""

    run: RestoredRun
    folder: Path
    """Run directory."""
    shown: Side
    """The requested split, whole."""
    trained: Side | None
    """The training images; None where these are shown."""
    tiles: int
    """Largest number of tiles in a map."""
    rng_seed: int = 0

    @property
    def config(self) -> TrainConfig:
        """Options of the run."""
        return self.run.plan.config

    @property
    def protocol(self) -> Protocol:
        """Protocol of the run."""
        return self.run.plan.protocol

    @property
    def sides(self) -> list[Side]:
        """The training images, if they are another split, and the requested split."""
        return [self.shown] if self.trained is None else [self.trained, self.shown]

    @property
    def holds_classes_out(self) -> bool:
        """Whether the classes of the evaluation are not those of training."""
        return "base" in self.protocol.splits

    def color(self, side: Side) -> str:
        """The colour of a split, the same in all pictures."""
        return TRAINED if side.split == self.protocol.splits[0] else OTHERS

    def rng(self, picture: int) -> np.random.Generator:
        """What a picture chooses by: the same in every call."""
        return np.random.default_rng([self.rng_seed, picture])


def view_run(run: RestoredRun, folder: Path, folders: Folders, split: str, tiles: int) -> View:
    """What the pictures of a split are drawn from; computes the features.

    Raises:
      DivergedError: The features are not finite.
    """
    outputs_of = build_outputs(
        run.network.graphdef, run.network.objective, run.plan.config.data, run.class_counts
    )

    def side(images: ImageSet, split: str, available: int) -> Side:
        some = np.linspace(0, len(images.labels) - 1, min(100, len(images.labels))).astype(int)
        dark = is_dark_on_light(images.images[some])
        outputs = outputs_of(run.state, images)
        return Side(split, images, outputs, available, dark, run.plan.config.data)

    def load(split: str) -> ImageSet:
        return run.plan.protocol.load(folders, split)

    trained_on, trained = run.plan.protocol.splits[0], None
    if split != trained_on:
        whole = load(trained_on)
        trained = side(_part(whole), trained_on, len(whole.labels))
    # Its numbers are those of the evaluation, which uses every image.
    shown = load(split)
    return View(run, folder, side(shown, split, len(shown.labels)), trained, tiles)


def some_rows(count: int) -> np.ndarray:
    """All rows of so many images, or a random part of `MOST_IMAGES`: int64, ascending."""
    if count <= MOST_IMAGES:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).permutation(count)[:MOST_IMAGES])


def _part(images: ImageSet) -> ImageSet:
    rows = some_rows(len(images.labels))
    if len(rows) == len(images.labels):
        return images
    return ImageSet(_Rows(images.images, rows), images.labels[rows], images.class_names)


class _Rows:
    """Some images of a table; reads them when they are indexed."""

    def __init__(self, table: Any, rows: np.ndarray):
        self._table, self._rows = table, rows
        self.shape = (len(rows), *table.shape[1:])
        self.dtype = table.dtype

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._table[self._rows[index]]
