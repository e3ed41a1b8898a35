"""What can be known to fail is found before anything is written."""

from __future__ import annotations

import numpy as np
from flax import nnx

from experiments.config import Folders, TrainConfig, check_config
from experiments.data.augment import check_settings, seen_shape
from experiments.data.builders import image_shape, split_names
from experiments.data.pipeline import class_counts
from experiments.data.sampling import batch_size_of, check_episodes, draw_batch, index_classes
from experiments.errors import ConfigError
from experiments.loss_names import parse_loss
from experiments.models import build_backbone
from experiments.training.parallel import check_batch_size
from experiments.training.state import learning_rate


def check_run(config: TrainConfig, folders: Folders) -> None:
    """Raises unless a run can be trained and evaluated as its configuration says.

    The data set is prepared if that has not been done; no image is read.

    Args:
      config: the run.
      folders: where data lies.

    Raises:
      ConfigError: a value is out of its bounds, or does not fit the others, the data or the
        devices.
      MissingArchiveError: the data set's archives are not there.
    """
    check_config(config)
    name = parse_loss(config.loss.name)
    strategy, batch_size = config.sampling.strategy, config.sampling.batch_size
    check_batch_size(batch_size_of(strategy, batch_size))
    learning_rate(config.optimizer, config.steps)

    shape = image_shape(config.data.name)
    check_settings(config.data, shape[-1])
    seen = seen_shape(shape, config.data)
    num_features = nnx.eval_shape(
        lambda: build_backbone(
            config.model, image_shape=seen, axis_name=None, rngs=nnx.Rngs(config.seed)
        )
    ).num_features

    splits = split_names(config.data.name)
    if not {"base", "novel"} <= set(splits):
        raise ConfigError(
            f"data.name = {config.data.name} holds no classes out (its splits are "
            f"{', '.join(splits)}), and few-shot evaluation needs base and novel classes"
        )
    counts = class_counts(
        config.data.name, data_dir=folders.data_dir, manual_dir=folders.manual_dir
    )
    indices = {
        split: index_classes(np.repeat(np.arange(len(images)), images))
        for split, images in counts.items()
    }
    draw_batch(indices["base"], strategy, batch_size, seed=config.seed, step=0)
    for split, shots in (("validation", (1,)), ("novel", config.evaluation.shots)):
        for number in shots if split in indices else ():
            _check_episodes(indices[split], split, config, number)

    num_classes = len(counts["base"])
    if name.family == "direct" and num_features <= num_classes:
        raise ConfigError(
            f"{config.loss.name} leaves the metric loss nothing: the classifier of {num_classes} "
            f"classes spans all {num_features} dimensions of the features. Choose "
            f"spectral:{config.loss.name.rpartition(':')[2]}, or a wider model"
        )


def _check_episodes(index, split: str, config: TrainConfig, shots: int) -> None:
    wanted = config.evaluation
    try:
        check_episodes(index, ways=wanted.ways, shots=shots, queries=wanted.queries)
    except ConfigError as error:
        raise ConfigError(
            f"the {split} classes of {config.data.name} cannot give the evaluation: {error}"
        ) from error
