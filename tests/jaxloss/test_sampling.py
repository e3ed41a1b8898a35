"""Batches and episodes: which samples, in which order, from which seed."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxloss.sampling import (
    ClassIndex,
    Episodes,
    class_batch,
    episode_classes,
    episodes,
    index_classes,
    random_batch,
)

# Classes of 3, 9, 5, 1 and 12 samples with gaps between the labels, shuffled.
LABELS = np.repeat([4, 7, 8, 20, 31], [3, 9, 5, 1, 12])[np.arange(30) * 7 % 30]


def test_random_batches_cover_an_epoch_without_repetition():
    epochs = []
    for epoch in range(3):
        batches = [random_batch(23, 5, seed=1, step=4 * epoch + i) for i in range(4)]
        drawn = np.concatenate(batches)
        assert drawn.dtype == np.int64
        assert drawn.shape == (20,)
        assert len(set(drawn)) == 20
        assert set(drawn) <= set(range(23))
        epochs.append(tuple(drawn))
    assert len(set(epochs)) == 3
    assert tuple(random_batch(23, 5, seed=2, step=0)) != epochs[0][:5]


def test_class_batch_has_whole_groups_of_distinct_classes():
    for step in range(20):
        batch = class_batch(LABELS, 3, 4, seed=5, step=step)
        assert batch.dtype == np.int64
        groups = LABELS[batch].reshape(3, 4)
        assert (groups == groups[:, :1]).all()
        assert len(set(groups[:, 0])) == 3
        assert len(set(batch)) == 12
        assert set(groups[:, 0]) <= {7, 8, 31}


def test_class_batches_draw_every_class_and_sample():
    drawn = np.concatenate([class_batch(LABELS, 2, 3, seed=0, step=s) for s in range(300)])
    counts = np.bincount(drawn, minlength=30)
    assert (counts[LABELS == 20] == 0).all()
    # 300 · 2 / 4 = 150 draws of each class that has three samples, three samples each.
    for label, size in ((4, 3), (7, 9), (8, 5), (31, 12)):
        mine = counts[label == LABELS]
        assert mine.sum() == pytest.approx(450, rel=0.2)
        np.testing.assert_allclose(mine, 450 / size, rtol=0.4)


TEN = np.arange(400) * 7 % 10


def episodes_of(num, seed=0, **changes) -> Episodes:
    settings = {"ways": 5, "shots": 2, "queries": 4} | changes
    return episodes(TEN, num_episodes=num, seed=seed, **settings)


def test_episodes_are_disjoint_and_of_distinct_classes():
    support, query = episodes_of(60)
    assert (support.dtype, query.dtype) == (np.int32, np.int32)
    assert (support.shape, query.shape) == ((60, 5, 2), (60, 5, 4))
    samples = np.concatenate([support, query], 2)
    classes = TEN[support[:, :, 0]]
    assert (TEN[samples] == classes[:, :, None]).all()
    for drawn, of in zip(samples, classes, strict=True):
        assert (len(set(drawn.ravel())), len(set(of))) == (30, 5)
    assert len(set(classes[:, 0])) == 10, "the class in the first place is always the same"


def test_a_longer_list_begins_with_the_shorter():
    few, many = episodes_of(5), episodes_of(20)
    np.testing.assert_array_equal(many.support[:5], few.support)
    np.testing.assert_array_equal(many.query[:5], few.query)
    assert (episodes_of(5, seed=1).support != few.support).any()


def test_negative_labels_are_ignored():
    known = np.where(LABELS == 8, -1, LABELS)
    for shots in (3, 9):
        batch = class_batch(known, 2, shots, seed=1, step=0)
        assert not np.isin(8, LABELS[batch])
    index = index_classes([2, -1, 0, 2, -5])
    assert [part.tolist() for part in index] == [[2, 0, 3], [0, 1, 3]]
    assert isinstance(index, ClassIndex)
    assert index_classes(index) is index


def test_the_draws_are_the_same_everywhere():
    assert random_batch(100, 5, seed=7, step=25).tolist() == [90, 11, 94, 91, 51]
    assert class_batch(LABELS, 2, 2, seed=7, step=3).tolist() == [26, 0, 19, 28]
    index = index_classes(LABELS)
    assert class_batch(index, 2, 2, seed=7, step=3).tolist() == [26, 0, 19, 28]


def test_impossible_batches_and_episodes_name_the_problem():
    of_class = partial(class_batch, seed=0, step=0)
    negative: tuple[Any, ...] = [], np.array([-1, -1])
    masked = np.ma.masked_equal(LABELS, 8)
    calls: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "at most 23, .* got 24", lambda: random_batch(23, 24, seed=0, step=0)),
        (
            ValueError,
            "needs 4 .* 4 samples each; of the 5 classes, 3",
            lambda: of_class(LABELS, 4, 4),
        ),
        (ValueError, "1 have 12 or more", lambda: of_class(LABELS, 1, 13)),
        *(
            (ValueError, "of the 0 classes, 0 have", lambda none=none: of_class(none, 1, 1))
            for none in negative
        ),
        (TypeError, "must be integers, got dtype float64", lambda: of_class(np.ones(3), 1, 1)),
        (TypeError, r"got a masked one; use labels.filled\(-1\)", lambda: of_class(masked, 1, 1)),
        (ValueError, r"shape \[n\], got \(30, 1\)", lambda: of_class(LABELS[:, None], 1, 1)),
        (ValueError, "of 11 ways.* of the 10 classes, 10", lambda: episodes_of(3, ways=11)),
        (ValueError, "at least 101 samples", lambda: episodes_of(3, queries=99)),
        (ValueError, "1 have 3 or more", lambda: episode_classes(np.array([2, 3]), 1, 2, 2)),
    ]
    for draw in (
        partial(of_class, ways=2, shots=1),
        partial(episodes, num_episodes=1, ways=2, shots=1, queries=1, seed=0),
    ):
        traced = partial(jax.jit(draw), jnp.arange(6) % 2)
        calls += [(TypeError, "`labels` must be .* known, got .*outside of `jax.jit`", traced)]
    for error, match, call in calls:
        with pytest.raises(error, match=match):
            call()


def test_numbers_out_of_range_are_named():
    calls = {
        "batch_size": lambda x: random_batch(23, x, seed=0, step=0),
        "ways": lambda x: class_batch(LABELS, x, 2, seed=0, step=0),
        "shots": lambda x: episodes_of(3, shots=x),
        "queries": lambda x: episodes_of(3, queries=x),
        "seed": lambda x: class_batch(LABELS, 1, 2, seed=x, step=0),
        "step": lambda x: random_batch(23, 5, seed=0, step=x),
        "num_episodes": episodes_of,
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"`{name}` must be an integer from . on, got -1"):
            call(-1)
        for wrong in (1.5, "1", True, None):
            with pytest.raises(TypeError, match=f"`{name}` must be an integer, got"):
                call(wrong)
