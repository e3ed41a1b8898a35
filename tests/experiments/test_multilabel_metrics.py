"""Mean average precision against scikit-learn and against explicit loops."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from experiments.evaluation.multilabel import average_precisions, evaluate_scores


def sample(n=60, classes=9, seed=0, unknown=0.15, rounded=False):
    """Scores and targets that agree in part; class 4 and samples 7, 8 have no positive."""
    random = np.random.default_rng(seed)
    targets = (random.random((n, classes)) < 0.25).astype(np.int32)
    scores = (random.normal(size=(n, classes)) + 1.2 * targets).astype(np.float32)
    scores = np.round(scores * 2) / 2 if rounded else scores
    targets[random.random((n, classes)) < unknown] = -1
    targets[:, 4] = np.minimum(targets[:, 4], 0)
    targets[7:9] = np.minimum(targets[7:9], 0)
    return scores, targets


def by_sklearn(scores, targets):
    known = targets >= 0
    if not (targets > 0).any():
        return np.nan
    return average_precision_score(targets[known] > 0, scores[known])


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_means_equal_scikit_learn_also_where_scores_are_equal(rounded, array):
    scores, targets = sample(rounded=rounded)
    assert len(np.unique(scores)) < 20 or not rounded
    result = evaluate_scores(array(scores), array(targets))
    of_classes = [by_sklearn(s, t) for s, t in zip(scores.T, targets.T, strict=True)]
    of_samples = [by_sklearn(s, t) for s, t in zip(scores, targets, strict=True)]
    assert result.map_class == pytest.approx(np.nanmean(of_classes), rel=1e-12)
    assert result.map_sample == pytest.approx(np.nanmean(of_samples), rel=1e-12)
    assert result.classes == 8
    assert result.classes_without_positive == 1
    assert result.samples == np.isfinite(of_samples).sum()
    assert result.samples + result.samples_without_positive == 60
    assert result.samples_without_positive >= 2
    assert result.class_precisions[4] is None
    assert result.class_precisions[3] == pytest.approx(of_classes[3], rel=1e-12)
    assert json.loads(json.dumps(result._asdict(), allow_nan=False)) == result._asdict()


def test_the_two_means_differ_and_order_alone_matters():
    scores, targets = sample()
    result = evaluate_scores(scores, targets)
    assert abs(result.map_class - result.map_sample) > 0.02
    monotone = evaluate_scores(np.exp(scores.astype(np.float64)) * 3 - 5, targets)
    assert monotone == result
    # A shift of each class changes what is compared within a sample, and not within a class.
    shifted = evaluate_scores(scores + 3 * np.arange(9, dtype=np.float32), targets)
    assert shifted.map_class == pytest.approx(result.map_class)
    assert shifted.map_sample < result.map_sample - 0.05
    transposed = evaluate_scores(scores.T, targets.T)
    assert transposed.map_class == result.map_sample
    assert transposed.map_sample == result.map_class


def test_many_rows_are_computed_in_parts():
    scores, targets = sample(n=500, classes=40)
    scores, targets = np.tile(scores, (20, 3)), np.tile(targets, (20, 3))
    scores += np.random.default_rng(1).normal(size=scores.shape)
    found = average_precisions(scores, targets, elements_at_once=10_000)
    np.testing.assert_array_equal(found, average_precisions(scores, targets))


def test_wrong_arguments_name_the_problem():
    scores, targets = sample()
    with pytest.raises(ValueError, match="no target is positive"):
        evaluate_scores(scores, np.minimum(targets, 0))
    with pytest.raises(ValueError, match="no target is positive"):
        evaluate_scores(scores[:0], targets[:0])
