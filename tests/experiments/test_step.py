"""The training step on one device and on many."""

from __future__ import annotations

import dataclasses
from functools import partial

import chex
import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from experiments.config import DataConfig, ModelConfig, ParallelMode, TrainConfig
from experiments.presets import PRESETS
from experiments.protocols.integration import IntegratedLoss
from experiments.training import parallel
from experiments.training.step import Batch, Step, build_step, mean_over_devices
from tests.experiments.tiny_runs import SHAPE, TINY, tiny_network

RESNET = ModelConfig(
    backbone="resnet12",
    widths=(2, 4, 6, 8),
    pooling="mean",
    dropout=0.1,
    drop_block=0.2,
    drop_block_steps=4,
)


def tiny_step(config: TrainConfig, axis_name: str | None = None):
    network = tiny_network(config, axis_name)
    step: Step = build_step(
        network.graphdef,
        network.objective,
        network.optimizer,
        config.data,
        key=jax.random.key(3),
        axis_name=axis_name,
    )
    return step, network.state


def run_steps(config: TrainConfig, mode: ParallelMode, num_steps: int = 3):
    step, state = tiny_step(config, parallel.axis_name(mode))
    run = parallel.data_parallel(mode, step)
    rng = np.random.default_rng(0)
    running, metrics = run.replicate(state), None
    for _ in range(num_steps):
        batch = Batch(
            rng.integers(0, 256, (16, *SHAPE), np.uint8), rng.integers(0, 5, 16).astype(np.int32)
        )
        running, metrics = run.step(running, run.split(batch))
    return jax.device_get((run.single(running), run.single(metrics)))


@pytest.mark.parametrize(
    ("loss", "model"),
    [
        (IntegratedLoss("sce"), RESNET),
        (IntegratedLoss("direct:sce+nca"), TINY.model),
        (IntegratedLoss("spectral:sce+nca", power=1.0), TINY.model),
    ],
    ids=["sce", "direct sum", "spectral sum"],
)
def test_pmap_and_sharded_jit_give_the_same_numbers(loss, model):
    config = dataclasses.replace(TINY, model=model, loss=loss)
    assert jax.device_count() == 4
    # Rounding in the batch normalisation of a few values grows over three steps, to 2.8e-5 in one
    # of the momenta on a CPU with AVX-512.
    chex.assert_trees_all_close(
        run_steps(config, "pmap"), run_steps(config, "jit"), rtol=2e-4, atol=6e-5
    )


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


def test_a_batch_that_does_not_spread_evenly_is_refused():
    with pytest.raises(ValueError, match="batch of 6 does not spread evenly over 4 devices"):
        parallel.check_batch_size(6, jax.device_count())


@pytest.mark.parametrize(
    "preset", ["icons", "icons-groups", "icons-sphere", "icons-longtail", "kanji", "icons-margin"]
)
def test_a_step_returns_the_structure_and_types_that_it_takes(preset):
    """Weak types included: otherwise a run compiles its step twice."""
    config = PRESETS[preset].config
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, widths=TINY.model.widths)
    )
    step, state = tiny_step(config)
    labels = np.eye(5, dtype=np.int8) if preset == "kanji" else np.arange(5, dtype=np.int32)
    after, _ = jax.eval_shape(step, state, Batch(np.zeros((5, *SHAPE), np.uint8), labels))

    def kind(leaf):
        aval = jax.typeof(leaf)
        return aval.shape, aval.dtype, aval.weak_type

    chex.assert_trees_all_equal_structs(after, state)
    assert jax.tree.map(kind, after) == jax.tree.map(kind, state)


def test_bfloat16_trains():
    config = dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, dtype="bfloat16"))
    state, metrics = run_steps(config, "jit", 2)
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(state.params))
    exact = run_steps(TINY, "jit", 2)[1]
    assert metrics["loss"] != exact["loss"]
    assert metrics["loss"] == pytest.approx(exact["loss"], rel=0.05)


def test_the_rate_of_drop_block_follows_the_steps_of_the_run():
    at_once = dataclasses.replace(TINY, model=dataclasses.replace(RESNET, drop_block_steps=0))
    rising = dataclasses.replace(TINY, model=RESNET)
    losses = [run_steps(config, "jit", 1)[1]["loss"] for config in (at_once, rising)]
    assert losses[0] != losses[1]


def test_augmentation_options_reach_the_step():
    plain = dataclasses.replace(TINY, data=DataConfig(pad=0, flip=False))
    assert run_steps(plain, "jit", 1)[1]["loss"] != run_steps(TINY, "jit", 1)[1]["loss"]
