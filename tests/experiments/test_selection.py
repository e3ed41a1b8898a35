"""Which images are for training, validation and test."""

import numpy as np
import pytest

from experiments.core.errors import ConfigError
from experiments.data.selection import TEST_SHARE, select

COUNTS = np.array([40, 7, 25, 60, 33, 12])
LABELS = np.repeat(np.arange(6), COUNTS)


def test_every_image_is_in_one_split():
    chosen = select(LABELS, holdout=0.2)
    rows = np.concatenate(list(chosen.rows.values()))
    np.testing.assert_array_equal(np.sort(rows), np.arange(len(LABELS)))
    test, validation = (chosen.counts(LABELS, split) for split in ("test", "validation"))
    np.testing.assert_array_equal(test, np.floor(TEST_SHARE * COUNTS + 0.5))
    np.testing.assert_array_equal(validation, np.floor(0.2 * (COUNTS - test) + 0.5))
    # Not the first or the last images of a class.
    assert np.diff(chosen.rows["test"]).max() > 1


def test_a_test_split_of_its_own_is_kept_whole():
    test = np.repeat(np.arange(6), [1, 2, 3, 4, 5, 6])
    chosen = select(LABELS, test_labels=test)
    np.testing.assert_array_equal(chosen.rows["test"], np.arange(len(test)))
    np.testing.assert_array_equal(chosen.rows["train"], np.arange(len(LABELS)))
    assert "validation" not in chosen.rows
    # Classes are chosen with their test images.
    chosen = select(LABELS, classes=2, test_labels=test)
    rows = np.flatnonzero(np.isin(test, chosen.classes))
    np.testing.assert_array_equal(chosen.rows["test"], rows)


def test_smaller_subsets_are_part_of_larger_ones():
    few, more = (select(LABELS, classes=count) for count in (3, 5))
    assert set(few.classes) < set(more.classes)
    few, more = (select(LABELS, samples_per_class=count) for count in (4, 9))
    assert set(few.rows["train"]) < set(more.rows["train"])
    available = COUNTS - more.counts(LABELS, "test")
    np.testing.assert_array_equal(more.counts(LABELS, "train"), np.minimum(available, 9))


@pytest.mark.parametrize(
    "options", [{}, {"classes": 6}, {"samples_per_class": 60}, {"holdout": 0.2}]
)
def test_a_subset_seed_that_chooses_nothing_is_refused(options):
    """Runs of other seeds would be the same run, and no repetitions."""
    for test_labels in (None, LABELS):
        select(LABELS, test_labels=test_labels, **options)
        with pytest.raises(ConfigError, match="subset_seed = 3 has no effect"):
            select(LABELS, test_labels=test_labels, subset_seed=3, **options)
        select(LABELS, test_labels=test_labels, subset_seed=3, **options | {"imbalance": 0.1})


def test_subset_seeds_draw_other_classes_and_training_images():
    """Test and validation images stay: runs of all subsets are compared on them."""
    drawn = [select(LABELS, classes=3, subset_seed=seed) for seed in range(6)]
    assert len({tuple(selection.classes) for selection in drawn}) > 3
    few = [select(LABELS, samples_per_class=5, holdout=0.2, subset_seed=s) for s in range(3)]
    assert len({tuple(selection.rows["train"]) for selection in few}) == 3
    for split in ("validation", "test"):
        assert len({tuple(selection.rows[split]) for selection in few}) == 1


def test_the_default_subset_stays():
    """The subsets of the results that are published here."""
    chosen = select(LABELS, classes=3, samples_per_class=3, holdout=0.2)
    assert chosen.classes.tolist() == [0, 1, 5]
    assert {split: rows.tolist() for split, rows in chosen.rows.items()} == {
        "train": [5, 31, 39, 40, 41, 45, 169, 170, 176],
        "validation": [10, 14, 17, 30, 32, 38, 44, 165, 166],
        "test": [0, 6, 8, 9, 13, 16, 18, 23, 26, 28, 35, 36, 42, 46, 168, 172, 173, 175],
    }


@pytest.mark.parametrize(("size", "classes", "factor"), [(5000, 10, 0.01), (500, 100, 0.005)])
def test_long_tails_as_published(size, classes, factor):
    """CIFAR-LT: class c of C keeps n_max f^{c/(C-1)} images, rounded down."""
    labels = np.repeat(np.arange(classes), size)
    chosen = select(labels, imbalance=factor, test_labels=np.arange(classes))
    expected = [int(size * factor ** (c / (classes - 1)) + 1e-9) for c in range(classes)]
    np.testing.assert_array_equal(chosen.counts(labels, "train"), expected)


def test_a_tail_can_begin_at_the_mean_of_the_classes():
    """As of SVHN: n_max = N / C, and no class has more than it has images."""
    chosen = select(LABELS, imbalance=0.1, tail_from="mean", test_labels=LABELS)
    counts, order = chosen.counts(LABELS, "train"), np.argsort(-COUNTS, kind="stable")
    tail = [int(len(LABELS) / 6 * 0.1 ** (k / 5) + 1e-9) for k in range(6)]
    np.testing.assert_array_equal(counts[order], np.minimum(tail, COUNTS[order]))
    assert counts.max() == len(LABELS) // 6 < COUNTS.max()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 7}, "data.classes = 7 must be from 2 to 6"),
        ({"classes": 1}, "data.classes = 1 must be from 2 to 6"),
        ({"imbalance": 0.001}, r"data.imbalance = 0.001 leaves a class .* set it to 1/\d+ or more"),
        ({"imbalance": 0.01, "tail_from": "mean"}, r"starts at [\d.]+ images: set it to 1/\d+ or"),
        ({"holdout": 0.05}, r"class 1 has too few images to hold out the fraction 0.05"),
    ],
)
def test_impossible_choices_name_the_option(options, message):
    with pytest.raises(ConfigError, match=message):
        select(LABELS, **options)
