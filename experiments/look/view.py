"""What pictures are drawn from: the images of a run's splits, and what it computes for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from experiments.core.config import Folders
from experiments.core.protocol import Outputs
from experiments.data.selection import some_rows
from experiments.evaluation.feature_space import class_membership, class_order, class_similarity
from experiments.reporting.style import BLUE, VERMILLION
from experiments.run import RestoredRun, features_of

MOST_IMAGES = 10_000
"""Training images whose features are computed, and images of the shown split among which a map and
neighbours choose; of more, a random part."""


@dataclass(frozen=True, eq=False)
class Side:
    """One split, and what the run computes for its images."""

    split: str
    outputs: Outputs
    color: str  # The same in all pictures.

    @property
    def some_rows(self) -> np.ndarray:
        """The images among which a map and neighbours choose: int64, ascending."""
        return some_rows(len(self.outputs.labels), MOST_IMAGES)

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
        return class_membership(self.outputs.labels, len(self.outputs.class_names))

    @cached_property
    def similar_classes(self) -> tuple[np.ndarray, np.ndarray]:
        """The classes [k] with an image, similar ones side by side, and their cosines [k, k]."""
        present = np.flatnonzero(self.membership.any(0))
        cosines = class_similarity(self.outputs.features, self.membership[:, present])
        order = class_order(cosines)
        return present[order], cosines[np.ix_(order, order)]

    def names_of(self, classes: Iterable[int]) -> list[str]:
        """The names of classes."""
        return [self.outputs.class_names[c] for c in classes]


class View(NamedTuple):
    """What pictures are drawn from."""

    run: RestoredRun
    sides: Sequence[Side]
    """The training images, if another split was requested, and the requested split, whole."""
    notes: Sequence[str]  # Which pictures show a part of the images.

    @property
    def shown(self) -> Side:
        """The requested split."""
        return self.sides[-1]

    @property
    def holds_classes_out(self) -> bool:
        """Whether the classes of the evaluation are not those of training."""
        return "base" in self.run.plan.protocol.splits


def view_run(run: RestoredRun, folders: Folders, split: str) -> View:
    """What the pictures of a split are drawn from; raises a `DivergedError`.

    The numbers of the requested split are those of the evaluation, which uses every image.
    """
    trained_on = run.plan.protocol.splits[0]
    sides, notes = [], []
    for name in dict.fromkeys((trained_on, split)):
        most = None if name == split else MOST_IMAGES
        outputs = features_of(run, name, folders=folders, most=most)
        if (count := len(outputs.labels)) == most:
            notes.append(f"Pictures show at most {most:,} images of the {name} split.")
        elif count > MOST_IMAGES:
            part = f"map and neighbours show a random part of {MOST_IMAGES:,}"
            notes.append(f"The {name} split has {count:,} images; {part}.")
        sides.append(Side(name, outputs, BLUE if name == trained_on else VERMILLION))
    return View(run, sides, notes)
