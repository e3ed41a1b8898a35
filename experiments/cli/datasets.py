"""The verb `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.cli.options import DataFolders
from experiments.config import Folders


@dataclass(frozen=True)
class Datasets:
    """List the data sets: which are ready, and what each of the others needs."""

    folders: DataFolders = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Prints the list."""
        from experiments.data.builders import dataset_status

        for status in dataset_status(self.folders.data_dir, self.folders.manual_dir):
            print(status)
        return 0
