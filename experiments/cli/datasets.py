"""The verb `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tyro

from experiments.cli.options import DataFolders
from experiments.config import Folders
from experiments.errors import ConfigError


@dataclass(frozen=True)
class Datasets:
    """List the data sets: which are ready, and what each of the others needs."""

    folders: DataFolders = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Prints the list."""
        from experiments.data.builders import dataset_status

        for status in dataset_status(**vars(self.folders)):
            print(status)
        return 0


@dataclass(frozen=True)
class Prepare:
    """Prepare data sets now, for example before they are copied to an object store."""

    names: tyro.conf.Positional[tuple[str, ...]]
    """The data sets, as `datasets` lists them; NAME@SIZE stores photographs at another size."""
    folders: DataFolders = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Prepares them, and prints their folders."""
        from experiments.data.builders import builder_class
        from experiments.data.builders.preparation import prepare

        if not self.names:
            raise ConfigError("prepare needs the name of a data set, as `datasets` lists them")
        classes = [builder_class(name) for name in self.names]  # Before the first is prepared.
        for cls in classes:
            print(prepare(cls, **vars(self.folders)).data_dir)
        return 0
