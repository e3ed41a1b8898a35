"""The command `settings`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Annotated

import tyro

from experiments.cli.options import DataFolders
from experiments.core.config import Folders, TrainConfig, option_types
from experiments.data.sampling import batch_size_of
from experiments.papers.presets import find_preset

_IN_STEPS = (
    "steps",
    "validate_every",
    "optimizer.warmup_steps",
    "optimizer.decay_steps",
    "model.drop_block_steps",
)


@dataclass(frozen=True)
class Settings:
    """List the settings of a preset, and where each of them comes from.

    Options that have their default and no source are left out. If the data set is prepared, steps
    are also given in epochs. Below is what differs from the published training and has no option.
    """

    preset: Annotated[str, tyro.conf.Positional]
    """Name of the preset, as in `train`."""
    folders: DataFolders = field(default_factory=Folders)

    def run(self, command: Sequence[str]) -> int:
        """Prints the table."""
        from experiments.reporting.markdown import table

        preset = find_preset(self.preset)
        steps_per_epoch = _steps_per_epoch(preset.config, self.folders)
        rows = _rows(preset.config, preset.sources, steps_per_epoch)
        print(f"{self.preset}: {preset.description}\n")
        print("\n".join(table(["option", "value", "source"], rows)))
        if preset.differences:
            print("\nWhat differs from the published training and has no option:\n")
            print("\n".join(f"- {sentence}" for sentence in preset.differences))
        return 0


def _rows(
    config: TrainConfig, sources: Mapping[str, str], steps_per_epoch: int | None
) -> list[tuple[str, str, str | None]]:
    from experiments.sweeps.grid import option_text

    default = type(config)()
    rows = []
    for option in option_types(config):
        value = attrgetter(option)(config)
        if option not in sources and value == attrgetter(option)(default):
            continue
        text = option_text(value, " ") or "none"
        if steps_per_epoch and value and option in _IN_STEPS:
            steps = value if isinstance(value, tuple) else (value,)
            epochs = " ".join(f"{number / steps_per_epoch:.4g}" for number in steps)
            text += f" ({epochs} epochs)"
        rows.append((option, text, sources.get(option)))
    return rows


def _steps_per_epoch(config: TrainConfig, folders: Folders) -> int | None:
    """None unless all data is prepared and has one label an image."""
    from experiments.datasets import PREFIX, describe, lookup
    from experiments.papers import build_protocol

    if config.data.name == PREFIX:  # A preset for a folder that the command line names.
        return None
    names = {config.data.name, vars(config.data).get("novel") or config.data.name}
    status = [describe(name, **vars(folders)) for name in names]
    if not all(data.ready for data in status) or lookup(config.data.name).multi_label:
        return None
    protocol = build_protocol(config)
    images = int(protocol.counts_by_split(folders)[protocol.splits[0]].sum())
    return images // batch_size_of(config.sampling.strategy, config.sampling.batch_size)
