"""Batches and episodes: which samples, in which order, from which seed."""

import numpy as np
import pytest

from experiments.core.errors import ConfigError
from experiments.data.sampling import (
    batch_size_of,
    draw_batch,
    episode_classes,
    episodes_hash,
    parse_strategy,
    support_orders,
)
from experiments.evaluation.few_shot import EpisodeConfig, configured_episodes
from jaxloss.sampling import Episodes, class_batch, episodes, index_classes, random_batch

TEN = np.arange(400) * 7 % 10


def episodes_of(num, seed=0) -> Episodes:
    return episodes(TEN, num_episodes=num, seed=seed, ways=5, shots=2, queries=4)


def test_strategies():
    assert parse_strategy("random") is None
    assert parse_strategy("32x4") == (32, 4)
    assert batch_size_of("random", 77) == 77
    assert batch_size_of("8x16", 77) == 128
    for wrong in ("", "32", "x4", "32x", "0x4", "4x0", "-1x4", "8x4x2", "8 x 4", "Random"):
        with pytest.raises(ValueError, match=r"`random`, or `NxK`"):
            parse_strategy(wrong)


def test_draw_batch_follows_the_strategy():
    index = index_classes(TEN)
    np.testing.assert_array_equal(
        draw_batch(index, "random", 7, seed=2, step=11), random_batch(400, 7, seed=2, step=11)
    )
    np.testing.assert_array_equal(
        draw_batch(index, "3x2", 7, seed=2, step=11), class_batch(index, 3, 2, seed=2, step=11)
    )


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
    # The draws are the same everywhere.
    assert episodes_hash(episodes) == "bae504785be27b0b"
    big_endian = Episodes(*(np.asfortranarray(part.astype(">i4")) for part in episodes))
    assert episodes_hash(big_endian) == episodes_hash(episodes)
    others = [
        episodes_of(20, seed=1),
        episodes_of(19),
        Episodes(episodes.query, episodes.support),
        Episodes(episodes.support.reshape(20, 2, 5), episodes.query),
    ]
    assert len({episodes_hash(other) for other in (episodes, *others)}) == 5


def test_what_the_data_cannot_give_is_an_error_of_an_option():
    with pytest.raises(ConfigError, match=r"sampling.batch_size: .* must be at most 23.* got 24"):
        draw_batch(23, "random", 24, seed=0, step=0)
    with pytest.raises(ConfigError, match=r"sampling.strategy = 11x2: .*of the 10 classes, 10"):
        draw_batch(index_classes(TEN), "11x2", 7, seed=0, step=0)
    with pytest.raises(ConfigError, match="evaluation: an episode of 11 ways"):
        configured_episodes(EpisodeConfig(ways=11), TEN, shots=2)
    with pytest.raises(ConfigError, match="evaluation: an episode of 2 ways"):
        episode_classes(np.array([2, 3]), 2, 2, 2)
