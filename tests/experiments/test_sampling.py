"""Batches and episodes: which samples, in which order, from which seed."""

import numpy as np
import pytest

from experiments.data.sampling import (
    Episodes,
    batch_size_of,
    draw_batch,
    episodes_hash,
    episodic_batch,
    evaluation_episodes,
    index_classes,
    parse_strategy,
    random_batch,
    support_orders,
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


@pytest.mark.parametrize("step", range(20))
def test_episodic_batch_has_whole_groups_of_distinct_classes(step):
    batch = episodic_batch(LABELS, 3, 4, seed=5, step=step)
    assert batch.dtype == np.int64
    groups = LABELS[batch].reshape(3, 4)
    assert (groups == groups[:, :1]).all()
    assert len(set(groups[:, 0])) == 3
    assert len(set(batch)) == 12
    assert set(groups[:, 0]) <= {7, 8, 31}


def test_episodic_batches_draw_every_class_and_sample():
    drawn = np.concatenate([episodic_batch(LABELS, 2, 3, seed=0, step=s) for s in range(300)])
    counts = np.bincount(drawn, minlength=30)
    assert (counts[LABELS == 20] == 0).all()
    # 300 · 2 / 4 = 150 draws of each class that has three samples, three samples each.
    for label, size in ((4, 3), (7, 9), (8, 5), (31, 12)):
        mine = counts[label == LABELS]
        assert mine.sum() == pytest.approx(450, rel=0.2)
        np.testing.assert_allclose(mine, 450 / size, rtol=0.4)


def test_strategies():
    assert parse_strategy("random") is None
    assert parse_strategy("32x4") == (32, 4)
    assert batch_size_of("random", 77) == 77
    assert batch_size_of("8x16", 77) == 128
    for wrong in ("", "32", "x4", "32x", "0x4", "4x0", "-1x4", "8x4x2", "8 x 4", "Random"):
        with pytest.raises(ValueError, match=r"`random`, or `NxK`"):
            parse_strategy(wrong)


def test_draw_batch_follows_the_strategy():
    index = index_classes(LABELS)
    np.testing.assert_array_equal(
        draw_batch(index, "random", 7, seed=2, step=11), random_batch(30, 7, seed=2, step=11)
    )
    np.testing.assert_array_equal(
        draw_batch(index, "3x2", 7, seed=2, step=11), episodic_batch(index, 3, 2, seed=2, step=11)
    )


TEN = np.arange(400) * 7 % 10


def episodes_of(num, seed=0, **changes) -> Episodes:
    settings = {"ways": 5, "shots": 2, "queries": 4} | changes
    return evaluation_episodes(TEN, num_episodes=num, seed=seed, **settings)


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


def test_support_orders_are_permutations_that_seed_and_episode_name():
    orders = support_orders(9, 50, seed=3, episode=7)
    assert orders.dtype == np.int32
    np.testing.assert_array_equal(np.sort(orders, 1), np.tile(np.arange(9), (50, 1)))
    assert len({tuple(order) for order in orders.tolist()}) == 50
    assert (support_orders(9, 50, seed=3, episode=7) == orders).all()
    assert (support_orders(9, 20, seed=3, episode=7) == orders[:20]).all()
    for other in ({"seed": 3, "episode": 8}, {"seed": 4, "episode": 7}):
        assert (support_orders(9, 50, **other) != orders).any()
    assert support_orders(6, 2, seed=0, episode=0).tolist() == [
        [0, 3, 4, 1, 2, 5],
        [2, 1, 3, 0, 4, 5],
    ]


def test_episode_hash_names_contents_and_shape():
    episodes = episodes_of(20)
    assert episodes_hash(episodes) == episodes_hash(episodes_of(20))
    big_endian = Episodes(*(np.asfortranarray(part.astype(">i4")) for part in episodes))
    assert episodes_hash(big_endian) == episodes_hash(episodes)
    others = [
        episodes_of(20, seed=1),
        episodes_of(19),
        Episodes(episodes.query, episodes.support),
        Episodes(episodes.support.reshape(20, 2, 5), episodes.query),
    ]
    names = {episodes_hash(other) for other in (episodes, *others)}
    assert len(names) == 5
    assert all(len(name) == 16 for name in names)


def test_the_draws_are_the_same_everywhere():
    assert random_batch(100, 5, seed=7, step=25).tolist() == [90, 11, 94, 91, 51]
    assert episodic_batch(LABELS, 2, 2, seed=7, step=3).tolist() == [26, 0, 19, 28]
    assert episodes_hash(episodes_of(20)) == "bae504785be27b0b"


def test_impossible_batches_and_episodes_name_the_problem():
    with pytest.raises(ValueError, match=r"sampling.batch_size = 24 must be in 1 … 23"):
        random_batch(23, 24, seed=0, step=0)
    with pytest.raises(ValueError, match=r"needs 4 classes .* 4 samples each; of the 5 classes, 3"):
        episodic_batch(LABELS, 4, 4, seed=0, step=0)
    with pytest.raises(ValueError, match="largest: 12, smallest: 1"):
        episodic_batch(LABELS, 1, 13, seed=0, step=0)
    with pytest.raises(ValueError, match=r"episode of 11 ways.* of the 10 classes, 10 have"):
        episodes_of(3, ways=11)
    with pytest.raises(ValueError, match="at least 101 samples"):
        episodes_of(3, queries=99)
