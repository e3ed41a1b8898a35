"""The training step on one device and on many."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial

import chex
import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from experiments.config import DataConfig, ModelConfig, ParallelMode, TrainConfig
from experiments.protocols.integration import IntegratedLoss
from experiments.training import parallel
from experiments.training.step import Batch, Step, build_step, mean_over_devices
from tests.experiments.tiny_runs import SHAPE, TINY, tiny_learner

RESNET = ModelConfig(
    backbone="resnet12",
    widths=(2, 4, 6, 8),
    pooling="mean",
    dropout=0.1,
    drop_block=0.2,
    drop_block_steps=4,
)


def tiny_step(config: TrainConfig, axis_name: str | None = None):
    learner = tiny_learner(config, axis_name)
    step: Step = build_step(
        learner.graphdef,
        learner.objective,
        learner.optimizer,
        config.data,
        key=jax.random.key(3),
        axis_name=axis_name,
    )
    return step, learner.state


@functools.cache
def run_steps(config: TrainConfig, mode: ParallelMode = "jit"):
    """The state after three steps, and the metrics of each."""
    step, state = tiny_step(config, parallel.axis_name(mode))
    run = parallel.data_parallel(mode, step)
    rng = np.random.default_rng(0)
    running, metrics = run.replicate(state), []
    for _ in range(3):
        batch = Batch(
            rng.integers(0, 256, (16, *SHAPE), np.uint8), rng.integers(0, 5, 16).astype(np.int32)
        )
        running, measured = run.step(running, run.split(batch))
        metrics.append(run.single(measured))
    return jax.device_get((run.single(running), metrics))


def with_model(**changes) -> TrainConfig:
    return dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, **changes))


DROPPING = dataclasses.replace(TINY, model=RESNET, loss=IntegratedLoss("sce"))


@pytest.mark.parametrize("config", [DROPPING, TINY], ids=["dropping", "direct sum"])
def test_pmap_and_sharded_jit_give_the_same_numbers(config):
    assert jax.device_count() == 4
    # Rounding in the batch normalisation of a few values grows over three steps, to 2.8e-5 in one
    # of the momenta on a CPU with AVX-512.
    chex.assert_trees_all_close(run_steps(config, "pmap"), run_steps(config), rtol=2e-4, atol=6e-5)


def test_the_arrays_of_a_mean_travel_together_on_cpus():
    tree = {
        "a": np.arange(12, dtype=np.float32).reshape(4, 3),
        "b": np.arange(4, dtype=np.float32) ** 2,
    }
    mesh = jax.make_mesh((4,), ("batch",), (AxisType.Auto,))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P("batch"), out_specs=P())
    def mean(tree):
        return mean_over_devices(jax.tree.map(lambda leaf: leaf[0], tree), "batch")

    chex.assert_trees_all_close(mean(tree), jax.tree.map(lambda leaf: leaf.mean(0), tree))
    for platform, transfers in (("cpu", 1), ("tpu", 2)):
        lowered = mean.trace(tree).lower(lowering_platforms=(platform,)).as_text()
        assert lowered.count("stablehlo.all_reduce") == transfers


def test_bfloat16_trains():
    state, metrics = run_steps(with_model(dtype="bfloat16"))
    assert all(np.isfinite(value) for value in metrics[-1].values())
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(state.params))
    exact = run_steps(TINY)[1][1]["loss"]
    assert metrics[1]["loss"] != exact
    assert metrics[1]["loss"] == pytest.approx(exact, rel=0.05)


def test_options_of_augmentation_and_drop_block_reach_the_step():
    plain = dataclasses.replace(TINY, data=DataConfig(pad=0, flip=False))
    # The rate rises with the steps of the run.
    at_once = dataclasses.replace(DROPPING, model=dataclasses.replace(RESNET, drop_block_steps=0))
    for one, other in ((TINY, plain), (DROPPING, at_once)):
        assert run_steps(one)[1][0]["loss"] != run_steps(other)[1][0]["loss"]
