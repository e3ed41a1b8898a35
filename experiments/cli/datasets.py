"""The command `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tyro

from experiments.cli.options import DataFolders
from experiments.core.config import Folders
from experiments.core.errors import ConfigError


@dataclass(frozen=True)
class Datasets:
    """List the data sets: which are prepared, or can be; with names, what each of these needs."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Data sets to describe; by default all, with a line each."""
    folders: DataFolders = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Prints the list."""
        from experiments.datasets import describe, overview

        found = [str(describe(name, **vars(self.folders))) for name in self.names]
        print("\n".join(found or overview(**vars(self.folders))))
        return 0


@dataclass(frozen=True)
class Prepare:
    """Prepare data sets now, for example before they are copied to an object store."""

    names: tyro.conf.Positional[tuple[str, ...]]
    """The data sets, as `datasets` lists them; NAME@SIZE stores photographs at another size."""
    folders: DataFolders = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Prepares them, and prints their folders."""
        from experiments.datasets import lookup
        from experiments.datasets.preparation import prepare

        if not self.names:
            raise ConfigError("prepare needs the name of a data set, as `datasets` lists them")
        datasets = [lookup(name) for name in self.names]  # Before the first is prepared.
        for dataset in datasets:
            print(prepare(dataset, **vars(self.folders)).data_dir)
        return 0
