"""What the weights of a run were trained on."""

from __future__ import annotations

from experiments.config import TrainConfig
from experiments.datasets import plain_name, share_images
from experiments.errors import ExperimentError
from experiments.protocols import build_protocol, config_from_dict
from experiments.protocols.classification import ClassSplit
from experiments.protocols.few_shot_data import test_split
from experiments.storage import storage_path
from experiments.training.checkpoints import run_folder
from experiments.training.run_directory import read_config


def seen_in_training(
    config: TrainConfig, data: str, split: ClassSplit = "all", most_runs: int = 100
) -> str:
    """What the backbone was trained on if test images may be among it, as a phrase; else empty.

    Protocols that hold images out leave out the same ones as the test split of a classification of
    `data`, whatever the image size; protocols that hold classes out train on all images of the
    others. Two sets that share images count as seen. So do the images of the run whose weights this
    one started from, as far as that run still exists; what a file of weights has seen is unknown.
    At most `most_runs` such runs are followed: edited ones may name each other.
    """
    trained_on = config.data.name
    if plain_name(trained_on) == plain_name(data):
        all_are_base = vars(config.data).get("novel") or split in ("all", "base")
        # Where classes are chosen, test images are not for training.
        of_classes = "base" in build_protocol(config).splits and not test_split(trained_on)
        if all_are_base and of_classes:
            return f"base classes of {trained_on}, which include test images"
    elif share_images(trained_on, data):
        return f"{trained_on}, which shares images with {data}"
    if not config.model.weights or not most_runs:
        return ""
    try:
        if not (path := storage_path(config.model.weights)).is_dir():
            return ""
        started_from = run_folder(path)
        before = config_from_dict(read_config(started_from))
    except ExperimentError:
        return ""
    return seen_in_training(before, data, split, most_runs - 1)
