"""The command `look`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from experiments.cli.options import DataFolders
from experiments.config import Folders


@dataclass(frozen=True)
class Look:
    """Draw what a run did to the feature space: a page of pictures.

    Writes look/index.html into the run directory, which needs no other file, and the pictures as
    PNG: maps of the features, nearest neighbours, similarity and accuracy of the classes, training
    curves; and, where they apply, the hardest episodes, the spectrum of the classifier and the
    reliability diagram.
    """

    directory: Annotated[Path, tyro.conf.Positional]
    """Run directory, or its folder of checkpoints."""
    split: Annotated[
        str | None, tyro.conf.arg(metavar="SPLIT", help_behavior_hint="(default: novel or test)")
    ] = None
    """base, validation or novel classes; without held-out classes: train, validation or test."""
    checkpoint: str = "best"
    """`best` by validation, `latest`, or the number of a step."""
    folders: DataFolders = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Draws the pictures and prints where the page is."""
        from experiments.look import look_at_run

        page, *others = look_at_run(
            self.directory,
            self.folders,
            split=self.split,
            which=self.checkpoint,
            command=shlex.join(command),
        )
        print(f"wrote {page}, which contains all pictures; and, in its folder:")
        print(", ".join(path.name for path in others))
        return 0
