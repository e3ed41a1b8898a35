"""Linear evaluation against scikit-learn, and the invariances of its optimum."""

import json

import numpy as np
import pytest
from scipy.special import logsumexp
from sklearn.linear_model import LogisticRegression

from experiments.evaluation.linear import PENALTIES, Labelled, evaluate_linear, fit_classifiers

CLASSES = 4
FEW = (1e-3, 0.3, 30.0, 1e4)


def sample(n=150, d=12, classes=CLASSES, seed=0, spread=0.9):
    """Features with a mean and directions of sizes 1 to 1/30, and uneven labels."""
    random = np.random.default_rng(seed)
    labels = random.choice(classes, size=n, p=np.arange(1, classes + 1) / sum(range(classes + 1)))
    centres = spread * np.random.default_rng(99).normal(size=(classes, d))
    rotation = np.linalg.qr(np.random.default_rng(98).normal(size=(d, d)))[0]
    features = centres[labels] + random.normal(size=(n, d))
    features = features * np.geomspace(1, 1 / 30, d) @ rotation + 0.5
    return Labelled(features.astype(np.float32), labels)


def objective(data, kernel, bias, penalty):
    """Mean cross-entropy + λ/(2n) ‖W‖² in float64."""
    kernel = np.asarray(kernel, np.float64)
    logits, n = data.features.astype(np.float64) @ kernel + np.asarray(bias), len(data.labels)
    losses = logsumexp(logits, axis=1) - logits[np.arange(n), data.labels]
    return losses.mean() + penalty / 2 / n * (kernel**2).sum()


def by_sklearn(data, penalty):
    model = LogisticRegression(C=1 / penalty, tol=1e-9, max_iter=20_000)
    model.fit(data.features.astype(np.float64), data.labels)
    return model


def test_the_optimum_is_that_of_scikit_learn():
    data = sample()
    fitted = fit_classifiers(data, CLASSES, penalties=FEW)
    assert fitted.converged.all()
    for i, penalty in enumerate(FEW):
        model = by_sklearn(data, penalty)
        theirs = objective(data, model.coef_.T, model.intercept_, penalty)
        ours = objective(data, fitted.kernels[i], fitted.biases[i], penalty)
        assert theirs * (1 - 1e-6) <= ours == pytest.approx(theirs, rel=1e-4)
        assert fitted.objectives[i] == pytest.approx(ours, rel=1e-4)
        found = data.features @ fitted.kernels[i] + fitted.biases[i]
        expected = model.decision_function(data.features.astype(np.float64))
        differences = found - expected  # A number for all classes of a sample changes nothing.
        assert np.ptp(differences, axis=1).max() < 0.03 * np.abs(expected).max()
        right = np.mean(found.argmax(1) == data.labels)
        assert fitted.accuracies(data)[i] == pytest.approx(right)
    assert fitted.objectives[0] < 0.3 < 1.2 < fitted.objectives[3]


@pytest.mark.long
def test_all_penalties_converge_and_their_order_does_not_matter():
    np.testing.assert_allclose(np.log10(PENALTIES), np.linspace(-6, 5, 45))
    data = sample()
    fitted = fit_classifiers(data, CLASSES)
    assert fitted.converged.all()
    assert (np.diff(fitted.objectives) > 0).all()
    some = [30, 3, 17, 20]
    shuffled = fit_classifiers(data, CLASSES, penalties=PENALTIES[some])
    np.testing.assert_allclose(shuffled.objectives, fitted.objectives[some], rtol=1e-4)
    # A solve ends where a start from zero ends: the first of equal penalties starts there.
    for i in (0, 20):
        alone = fit_classifiers(data, CLASSES, penalties=PENALTIES[[i] * 4])
        np.testing.assert_allclose(alone.objectives[0], fitted.objectives[i], rtol=1e-4)
    # Too few iterations are reported.
    fitted = fit_classifiers(data, CLASSES, penalties=[1e-6] * 4, max_iterations=3)
    assert fitted.iterations.tolist() == [3] * 4
    assert not fitted.converged[0]


def test_more_features_than_samples_and_constant_features():
    data = sample(n=20, d=30)
    fitted = fit_classifiers(data, CLASSES, penalties=[1e-3, 1.0])
    assert fitted.converged.all()
    assert fitted.accuracies(data)[0] == 1
    model = by_sklearn(data, 1.0)
    expected = objective(data, model.coef_.T, model.intercept_, 1.0)
    assert fitted.objectives[1] == pytest.approx(expected, rel=1e-4)
    constant = Labelled(np.full((20, 30), 2.5, np.float32), data.labels)
    fitted = fit_classifiers(constant, CLASSES, penalties=[1e-3, 1.0])
    assert fitted.converged.all()
    share = np.bincount(data.labels) / 20
    entropy = -(share * np.log(share)).sum()
    np.testing.assert_allclose(fitted.objectives, entropy, rtol=1e-4)


def test_the_optimum_follows_shift_and_scale_of_the_features():
    data, penalties = sample(), np.array(FEW)
    fitted = fit_classifiers(data, CLASSES, penalties=penalties)
    moved = Labelled(8 * data.features + 100, data.labels)
    found = fit_classifiers(moved, CLASSES, penalties=64 * penalties)
    np.testing.assert_allclose(found.objectives, fitted.objectives, rtol=1e-4)


def test_the_penalty_is_chosen_on_validation_and_refitted_on_both():
    train, validation, test = (sample(n, seed=s, spread=0.5) for s, n in enumerate((150, 70, 400)))
    result = evaluate_linear(train, validation, test)
    fitted = fit_classifiers(train, CLASSES)
    np.testing.assert_allclose(result["validation"], fitted.accuracies(validation))
    np.testing.assert_allclose(result["test"], fitted.accuracies(test))
    assert result["penalties"] == PENALTIES.tolist()
    best = max(result["validation"])
    # Of equally good penalties the largest.
    largest = max(np.flatnonzero(np.asarray(result["validation"]) == best))
    assert (result["penalty"], result["validation_accuracy"]) == (PENALTIES[largest], best)
    both = Labelled(*(np.concatenate(parts) for parts in zip(train, validation, strict=True)))
    predicted = by_sklearn(both, result["penalty"]).predict(test.features)
    assert result["accuracy"] == pytest.approx(np.mean(predicted == test.labels), abs=2.5 / 400)
    per_class = [np.mean(predicted[test.labels == c] == c) for c in range(CLASSES)]
    assert result["class_mean_accuracy"] == pytest.approx(np.mean(per_class), abs=0.02)
    # The paper's number: every classifier is trained on both sets, and the test set chooses.
    whole = fit_classifiers(both, CLASSES).accuracies(test)
    best = PENALTIES[max(np.flatnonzero(whole == whole.max()))]
    assert (result["best_test_accuracy"], result["best_test_penalty"]) == (whole.max(), best)
    assert (result["converged"], result["unconverged"]) == (True, 0)
    sizes = [result[f"{part}_samples"] for part in ("train", "validation", "test")]
    assert sizes == [150, 70, 400]
    assert json.loads(json.dumps(result, allow_nan=False)) == result
