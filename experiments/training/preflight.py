"""What can be known to fail is found before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from flax import nnx

from experiments.config import Folders, TrainConfig, check_config
from experiments.data.augment import check_settings, seen_shape
from experiments.data.builders import image_shape, is_multi_label
from experiments.data.sampling import batch_size_of, draw_batch, index_classes
from experiments.errors import ConfigError
from experiments.models import build_backbone
from experiments.protocols import protocol_of
from experiments.training.parallel import check_batch_size
from experiments.training.state import learning_rate


def check_options(config: TrainConfig) -> int:
    """Raises unless the options of a run fit each other and the devices; no data is touched.

    Args:
      config: the run.

    Returns:
      The features that its backbone gives.

    Raises:
      ConfigError: a value is out of its bounds, or does not fit the others or the devices.
    """
    check_config(config)
    check_batch_size(batch_size_of(config.sampling.strategy, config.sampling.batch_size))
    learning_rate(config.optimizer, config.steps)

    shape = image_shape(config.data.name)
    check_settings(config.data, shape[-1])
    seen = seen_shape(shape, config.data)
    num_features = nnx.eval_shape(
        lambda: build_backbone(
            config.model, image_shape=seen, axis_name=None, rngs=nnx.Rngs(config.seed)
        )
    ).num_features

    if config.model.weights and not Path(config.model.weights).exists():
        raise ConfigError(
            f"model.weights = {config.model.weights} is not there; give a file *.safetensors or a "
            "run directory"
        )
    if config.model.weights and config.model.dim:
        raise ConfigError("model.weights are for a backbone alone; model.dim must be 0")
    protocol_of(config).check_options(config, num_features)
    return num_features


def check_run(config: TrainConfig, folders: Folders) -> Mapping[str, np.ndarray]:
    """Raises unless a run can be trained and evaluated as its configuration says.

    The data set is prepared if that has not been done, after all that can be told without it; no
    image is read.

    Args:
      config: the run.
      folders: where data lies.

    Returns:
      For every split that the protocol has, the images of every class.

    Raises:
      ConfigError: a value is out of its bounds, or does not fit the others, the data or the
        devices.
      MissingArchiveError: the data set's archives are not there.
    """
    num_features = check_options(config)
    protocol = protocol_of(config)
    counts = protocol.counts(config, folders)
    of_training = counts[protocol.splits[0]]
    # Of images with any number of labels, the protocol knows how many there are.
    if not is_multi_label(config.data.name):
        index = index_classes(np.repeat(np.arange(len(of_training)), of_training))
        sampling = config.sampling
        draw_batch(index, sampling.strategy, sampling.batch_size, seed=config.seed, step=0)
    protocol.check(config, num_features, counts)
    return counts
