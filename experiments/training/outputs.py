"""What a trained state computes for images: features, and logits on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.config import DataConfig
from experiments.contracts import ImageSet, ImageTable, Objective, Outputs
from experiments.data.augment import normalize
from experiments.errors import DivergedError
from experiments.processes import gather_rows
from experiments.training.step import TrainState


def extract_features(
    embed: Callable[[Any], Array],
    images: ImageTable,
    *,
    batch_size: int = 256,
    num_devices: int = 1,
) -> np.ndarray:
    """The features of every image.

    Several processes share the work: all of them call this, each reads and embeds its share of the
    images, and all receive the features of all images. The last batch is filled up with copies of
    the last image, so that `embed` compiles once.

    Args:
      embed: Maps b stored images to features [b, d]; jitted by the caller.
      images: The n images.
      batch_size: Images per call and device; fewer where several devices have fewer.
      num_devices: Devices of this process over which `embed` spreads its images.

    Returns:
      float32 [n, d].

    Raises:
      ValueError: There is no image, or `embed` does not return a row per image.
    """
    count = len(images)
    if count == 0:
        raise ValueError("there is no image to extract features from")
    of_all = num_devices * jax.process_count()
    if of_all > 1:
        batch_size = min(batch_size, -(-count // of_all))
    share, parts = batch_size * num_devices, []
    for start in range(0, count, batch_size * of_all):
        first = start + share * jax.process_index()
        indices = np.minimum(np.arange(first, first + share), count - 1)
        part = np.asarray(embed(images[indices]), np.float32)
        if part.ndim != 2 or len(part) != share:
            raise ValueError(f"embed must return [{share}, d], got {list(part.shape)}")
        parts.append(gather_rows(part)[: count - start])
    return np.concatenate(parts)


def build_embed(graphdef: nnx.GraphDef, data: DataConfig) -> Callable[[TrainState, Any], Array]:
    """The features [n, d] of stored images as a compiled function of the state."""

    @jax.jit
    def embed(params, statistics, images):
        model = nnx.merge(graphdef, params, statistics, copy=True)
        return model(normalize(images, data), train=False)  # pyright: ignore[reportCallIssue]

    return lambda state, images: embed(state.params["backbone"], state.statistics, images)


def build_features(
    graphdef: Any, data: DataConfig
) -> Callable[[TrainState, ImageTable], np.ndarray]:
    """The features float32 [n, d] of images as a function of the state; it compiles once.

    They are computed on the devices of all processes, each of which calls the function. It raises a
    `DivergedError` where a feature is not finite.
    """
    embed, devices = build_embed(graphdef, data), jax.local_devices()
    mesh = jax.make_mesh((len(devices),), ("batch",), (AxisType.Auto,), devices=devices)
    everywhere, spread = (NamedSharding(mesh, spec) for spec in (P(), P("batch")))

    def features(state: TrainState, images: ImageTable) -> np.ndarray:
        copied = state
        if len(devices) > 1:  # Without the head, whose classes may be spread over devices.
            backbone, statistics = jax.device_put(
                (state.params["backbone"], state.statistics), everywhere
            )
            copied = state._replace(params={"backbone": backbone}, statistics=statistics)

        def embed_share(rows: Any) -> Array:
            return embed(copied, jax.device_put(rows, spread) if len(devices) > 1 else rows)

        found = extract_features(embed_share, images, num_devices=len(devices))
        _check_finite(state, "feature", found)
        return found

    return features


def build_outputs(
    graphdef: Any, objective: Objective, data: DataConfig, class_counts: np.ndarray
) -> Callable[[TrainState, ImageSet], Outputs]:
    """The outputs of images as a function of the state; it compiles once.

    The features are those of `build_features`. The logits raise a `DivergedError` where one is not
    finite.
    """
    features_of, logits_of = build_features(graphdef, data), jax.jit(objective.logits)

    def outputs(state: TrainState, images: ImageSet) -> Outputs:
        features = features_of(state, images.images)
        head = state.params["classifier"]

        def logits() -> np.ndarray:
            values = np.asarray(logits_of(features, head, state.objective_state))
            _check_finite(state, "logit", values)
            return values

        return Outputs(features, images.labels, logits, class_counts, state.objective_state, head)

    return outputs


def _check_finite(state: TrainState, what: str, values: np.ndarray) -> None:
    """Raises a `DivergedError` unless all values are finite."""
    if not np.isfinite(values).all():
        raise DivergedError(int(state.step), f"a {what} of an image is not finite")
