"""The training step on one device and on many, and what a trained state computes."""

from __future__ import annotations

import dataclasses
from functools import partial
from unittest.mock import Mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from experiments.core.config import DataConfig, ModelConfig, ParallelMode, TrainConfig
from experiments.core.errors import DivergedError
from experiments.core.protocol import ImageSet, Loss, Objective
from experiments.data.augment import mix_batch
from experiments.papers import build_protocol
from experiments.papers.integration import IntegratedLoss
from experiments.run import Plan, build_learner
from experiments.training import parallel
from experiments.training.step import (
    Batch,
    TrainState,
    build_features,
    build_outputs,
    build_step,
    mean_over_devices,
)
from tests.experiments.tiny_runs import TINY
from tests.tolerances import FLOAT32

SHAPE = (16, 16, 1)
RESNET = ModelConfig(
    backbone="resnet12",
    widths=(2, 4, 6, 8),
    pooling="mean",
    dropout=0.1,
    drop_block=0.2,
    drop_block_steps=4,
)


def run_steps(config: TrainConfig, mode: ParallelMode):
    axis_name = parallel.axis_name(mode)
    plan = Plan(config, build_protocol(config), SHAPE, config.model.widths[-1])
    graphdef, objective, optimizer, state = build_learner(
        plan, np.full(5, 100), 10, axis_name=axis_name
    )
    key = jax.random.key(3)
    step = build_step(graphdef, objective, optimizer, config.data, key=key, axis_name=axis_name)
    run = parallel.data_parallel(mode, step)
    rng = np.random.default_rng(0)
    running, metrics = run.replicate(state), []
    for _ in range(3):
        images, labels = rng.integers(0, 256, (16, *SHAPE), np.uint8), rng.integers(0, 5, 16)
        running, measured = run.step(running, run.split(Batch(images, np.int32(labels))))
        metrics.append(run.single(measured))
    return jax.device_get((run.single(running), metrics))


DROPPING = dataclasses.replace(TINY, model=RESNET, loss=IntegratedLoss("sce"))


@pytest.mark.parametrize("config", [pytest.param(DROPPING, marks=pytest.mark.long), TINY])
def test_pmap_and_sharded_jit_give_the_same_numbers(config):
    assert jax.device_count() == 4
    # Rounding in the batch normalisation of a few values grows over three steps, to 2.8e-5 in one
    # of the momenta on a CPU with AVX-512.
    chex.assert_trees_all_close(
        run_steps(config, "pmap"), run_steps(config, "jit"), rtol=64 * FLOAT32, atol=32 * FLOAT32
    )


def test_the_arrays_of_a_mean_travel_together_on_cpus():
    tree = {"a": np.arange(12.0).reshape(4, 3), "b": np.arange(4.0) ** 2}
    mesh = jax.make_mesh((4,), ("batch",), (AxisType.Auto,))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("batch"), out_specs=P())
    def mean(tree):
        return mean_over_devices(jax.tree.map(lambda leaf: leaf[0], tree), "batch")

    chex.assert_trees_all_close(mean(tree), jax.tree.map(lambda leaf: leaf.mean(0), tree))
    for platform, transfers in (("cpu", 1), ("tpu", 2)):
        lowered = mean.trace(tree).lower(lowering_platforms=(platform,)).as_text()
        assert lowered.count("stablehlo.all_reduce") == transfers


class _MeanPixel(nnx.Module):
    """One feature: a parameter divided by the mean of the pixels. It counts training batches."""

    def __init__(self):
        self.factor = nnx.Param(jnp.ones(()))
        self.batches = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, images, *, train, keys=None, step=None):
        assert train == (keys is not None)
        self.batches[...] += train
        return self.factor[...] / images.mean(axis=(1, 2, 3))[:, None]


GRAPHDEF, PARAMS, STATISTICS = nnx.split(_MeanPixel(), nnx.Param, ...)
STATE = TrainState(
    step=jnp.int32(5),
    params={"backbone": PARAMS, "classifier": {"kernel": jnp.float32([[2.0, -1.0]])}},
    statistics=STATISTICS,
    opt_state=(),
    objective_state={"shift": jnp.float32([0.5, 0.0])},
)
OBJECTIVE = Objective(
    init_head=lambda key: {},
    loss=lambda features, labels, head, state: Loss(jnp.zeros(()), state, {}),
    logits=lambda features, head, state: jnp.sqrt(features @ head["kernel"] + state["shift"]),
)
DATA = DataConfig(mean=(0.0,), std=(1.0,))


def images_of(*pixels: int) -> ImageSet:
    images = np.tile(np.array(pixels, np.uint8)[:, None, None, None], (1, 2, 2, 1))
    return ImageSet(images, np.arange(len(pixels), dtype=np.int32), ("a", "b"))


def test_outputs_have_the_features_and_the_objectives_logits():
    objective = OBJECTIVE._replace(
        logits=lambda x, head, state: x @ head["kernel"] + state["shift"]
    )
    outputs_of = build_outputs(GRAPHDEF, objective, DATA, np.array([4, 9]))
    features, labels, logits, counts, state, head, *_ = outputs_of(STATE, images_of(51, 204))
    np.testing.assert_allclose(features, [[5.0], [1.25]], rtol=FLOAT32)
    np.testing.assert_allclose(logits(), [[10.5, -5.0], [3.0, -1.25]], rtol=FLOAT32)
    assert (labels.tolist(), counts.tolist()) == ([0, 1], [4, 9])
    assert (state, head) == (STATE.objective_state, STATE.params["classifier"])


def test_every_process_computes_the_features_of_its_share_of_the_images(monkeypatch):
    """20 images, of which two processes of four devices take 12 each: the last ones are copies."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    shares, pixels = [], np.arange(1, 21, dtype=np.uint8)
    for rank in range(2):
        monkeypatch.setattr(jax, "process_index", lambda rank=rank: rank)
        gather = Mock(side_effect=lambda rows: np.tile(rows, (2, 1)))
        monkeypatch.setattr("experiments.training.step.gather_rows", gather)
        build_features(GRAPHDEF, DATA)(STATE, images_of(*pixels.tolist()).images)
        shares += [call.args[0] for call in gather.mock_calls]
    found = np.concatenate(shares)[:, 0]
    expected = 255 / pixels[np.minimum(np.arange(24), 19)]
    np.testing.assert_allclose(found, expected, rtol=4 * FLOAT32)


def test_a_value_that_is_not_finite_ends_the_run():
    outputs_of = build_outputs(GRAPHDEF, OBJECTIVE, DATA, np.ones(2, int))
    # 1 / 0 is infinite, for the second image alone.
    with pytest.raises(DivergedError, match="a feature of an image is not finite at step 5"):
        outputs_of(STATE, images_of(51, 0))
    # The features are finite, and one of the logits is the root of a negative number.
    outputs = outputs_of(STATE, images_of(51))
    with pytest.raises(DivergedError, match="a logit of an image is not finite at step 5"):
        outputs.logits()


@pytest.mark.parametrize("mixed_labels", ["both", "larger"])
def test_a_step_mixes_the_losses_of_its_labels(monkeypatch, mixed_labels):
    """The loss of mixed images is shared by their labels as the pixels are, or has the first."""
    exchanged = mixed_labels == "larger"

    def mix(*batch, **how):
        mixed = mix_batch(*batch, **how)
        first, second = (mixed.labels, mixed.other_labels)[:: -1 if exchanged else 1]
        return mixed._replace(labels=first, other_labels=second)

    monkeypatch.setattr("experiments.training.step.mix_batch", mix)

    def loss(features, labels, head, objective_state):
        value = jnp.mean(features[:, 0] * labels)
        return Loss(value, objective_state + 1, {"of the first": features[0, 0]})

    optimizer, objective = optax.sgd(1.0, momentum=0.9), OBJECTIVE._replace(loss=loss)
    state = STATE._replace(params={"backbone": PARAMS, "classifier": {}}, objective_state=7)
    data = dataclasses.replace(DATA, pad=0, flip=False, mixup=1.0, mixed_labels=mixed_labels)
    step = jax.jit(
        build_step(GRAPHDEF, objective, optimizer, data, key=jax.random.key(5), axis_name=None)
    )

    pixels, labels = np.array([10, 250, 40, 120], np.uint8), np.array([3, 1, 0, 7], np.int32)
    images, shares = np.tile(pixels[:, None, None, None], (1, 2, 2, 1)), []
    for number in range(4):
        at = state._replace(step=jnp.int32(number), opt_state=optimizer.init(state.params))
        after, metrics = step(at, Batch(images, labels))
        own, partner = pixels / 255, pixels[::-1] / 255
        share = (1 / metrics["of the first"] - partner[0]) / (own[0] - partner[0])
        mixed = share * own + (1 - share) * partner
        weight = 0 if exchanged else share
        expected = weight * np.mean(labels / mixed) + (1 - weight) * np.mean(labels[::-1] / mixed)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=32 * FLOAT32)
        # The loss is the parameter, 1, times its derivative.
        factor = after.params["backbone"]["factor"][...]
        np.testing.assert_allclose(factor, 1 - expected, rtol=32 * FLOAT32)
        (momentum,) = jax.tree.leaves(after.opt_state)
        np.testing.assert_allclose(momentum, expected, rtol=32 * FLOAT32)
        (batches,) = jax.tree.leaves(after.statistics)
        assert (after.step, batches, after.objective_state) == (number + 1, 1, 8)
        shares.append(float(share))
    # A sample's own label has the larger share; every step has another.
    assert 0.5 <= min(shares) < max(shares) < 1
    assert len(set(shares)) == 4
