"""Protocol A's queue: features of earlier batches, in the loss, over devices and in checkpoints."""

from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from experiments.contracts import Problem
from experiments.protocols import few_shot
from experiments.protocols.integration import IntegratedLoss
from experiments.training.parallel import device_mesh

OPTIONS = IntegratedLoss("direct:sce+multi-similarity", queue=12, metric_weight=0.5)
PROBLEM = Problem(9, np.full(4, 9))


def batches():
    rng = np.random.default_rng(5)
    for labels in ([0, 1, 1, 2, 0, 3, 3, 2], [2, 2, 1, 0, 3, 1, 0, 3]):
        yield jnp.float32(rng.normal(size=(8, 9))), jnp.asarray(labels)


def test_the_metric_loss_compares_with_the_batch_and_with_earlier_ones():
    first, (x, labels) = batches()
    with_queue = few_shot.objective(OPTIONS, PROBLEM)
    alone = few_shot.objective(dataclasses.replace(OPTIONS, queue=0), PROBLEM)
    head = with_queue.init_head(jax.random.key(0))
    # Nothing is in the queue yet.
    found = with_queue.loss(*first, head, with_queue.init_state())
    assert float(found.value) == pytest.approx(float(alone.loss(*first, head, ()).value), rel=1e-6)
    state = found.objective_state
    assert sorted(state.labels.tolist()) == [-1] * 4 + [0, 0, 1, 1, 2, 2, 3, 3]
    earlier, now = (
        jaxloss.project_complement(rows / jnp.linalg.norm(rows, axis=1)[:, None], head["kernel"])
        for rows in (first[0], x)
    )
    of_queue = jaxloss.multi_similarity_loss(
        now, labels, normalize=False, references=earlier, reference_labels=first[1]
    )
    expected = alone.loss(x, labels, head, ()).value + 0.5 * of_queue
    second = with_queue.loss(x, labels, head, state)
    assert float(second.value) == pytest.approx(float(expected), rel=1e-5)
    assert (second.objective_state.labels >= 0).all()


def test_devices_share_the_references_and_keep_the_same_queue():
    single = few_shot.objective(OPTIONS, PROBLEM)
    head, state = single.init_head(jax.random.key(0)), single.init_state()
    several = few_shot.objective(OPTIONS, PROBLEM._replace(axis_name="batch"))
    mesh = device_mesh("jit", "", jax.devices()[:4])
    on_mesh = jax.jit(few_shot.objective(OPTIONS, PROBLEM._replace(mesh=mesh)).loss)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state)
    step = jax.pmap(several.loss, axis_name="batch", in_axes=(0, 0, None, 0))
    for x, labels in batches():
        expected = single.loss(x, labels, head, state)
        found = step(x.reshape(4, 2, 9), labels.reshape(4, 2), head, states)
        np.testing.assert_allclose(found.value, np.full(4, expected.value), rtol=1e-5)
        of_mesh = on_mesh(x, labels, head, state)
        np.testing.assert_allclose(of_mesh.value, expected.value, rtol=1e-5)
        chex.assert_trees_all_close(of_mesh.objective_state, expected.objective_state, atol=1e-6)
        state, states = expected.objective_state, found.objective_state
        for leaf, copies in zip(jax.tree.leaves(state), jax.tree.leaves(states), strict=True):
            np.testing.assert_allclose(copies, np.stack([leaf] * 4), atol=1e-6)
