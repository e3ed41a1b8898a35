"""Pictures of what a run did to the feature space, from its checkpoint to one page."""

from __future__ import annotations

from pathlib import Path

import matplotlib

from experiments.core.config import Folders
from experiments.core.errors import ConfigError
from experiments.look.charts import by_class, reliability, similarity, spectrum, training
from experiments.look.images import class_map, hard_episodes, neighbours, overview
from experiments.look.mistakes import confusion, wrong_images
from experiments.look.page import write_page
from experiments.look.view import view_run
from experiments.reporting.run import describe_run, version_text
from experiments.reporting.style import STYLE
from experiments.run import data_notes, load_run, split_of

DRAWN = (
    *(overview, class_map, neighbours, similarity, by_class),
    *(wrong_images, confusion, hard_episodes, spectrum, reliability, training),
)
"""Every picture in the order of the page; None where it does not apply."""


@matplotlib.rc_context(STYLE)
def look_at_run(
    path: Path,
    folders: Folders,
    *,
    split: str | None = None,
    checkpoint: str = "best",
    command: str,
) -> list[Path]:
    """Draws every picture that applies to a run, and writes them with a page that has them all.

    Run and checkpoint are those of `load_run`, the split is by default the one for evaluation.
    Returns the page, the numbers, and the pictures.
    """
    run = load_run(path, checkpoint)
    config, protocol, wanted = run.plan.config, run.plan.protocol, split_of(run.plan, split)
    print(f"{path}: features, then pictures …", flush=True)
    view = view_run(run, folders, wanted)
    parts = [
        f"{len(side.outputs.labels):,} {side.split} images "
        f"({len(side.outputs.class_names)} {side.noun})"
        for side in view.sides
    ]
    notes, pictures = [*view.notes], []
    for draw in DRAWN:
        try:
            if picture := draw(view):
                pictures.append(picture)
        except ConfigError as error:
            notes.append(f"A picture is missing: {error}.")
    described = describe_run(config, protocol)
    name = "look" if wanted == protocol.splits[-1] else f"look-{wanted}"
    name += "" if checkpoint == "best" else f"-step{run.step}"
    return write_page(
        run.directory / name,
        pictures,
        [*data_notes(config.data.name), *notes, *run.notes, version_text(described)],
        title=f"{described['label']} on {described['data']}",
        summary=f"Features of {' and '.join(parts)}, d = {run.plan.num_features}, checkpoint of "
        f"step {run.step}, {described['sampling']} batches, seed {described['seed']}.",
        command=command,
    )
