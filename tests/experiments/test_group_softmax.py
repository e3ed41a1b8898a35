"""Protocol B: its objective, the start of its classifier, its labels and checks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

import jaxloss
from experiments.core.errors import ConfigError
from experiments.core.protocol import Objective, Outputs, Problem
from experiments.evaluation.feature_space import gradient_directions
from experiments.papers.group_softmax import GroupLoss, GroupSoftmax, GroupSoftmaxConfig
from tests.jaxloss import references
from tests.tolerances import FLOAT32

DIM = 10
COUNTS = np.array([4, 4, 3, 5])


def protocol_of(**options) -> GroupSoftmax:
    return GroupSoftmax(GroupSoftmaxConfig(loss=GroupLoss(**options)))


def build(seed: int = 0, axis_name: str | None = None, **options) -> Objective:
    problem = Problem(DIM, COUNTS, seed=seed, axis_name=axis_name)
    return protocol_of(**options).objective(problem)


CONTIGUOUS = np.array([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2]])


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"name": "softmax", "num_groups": 3}, {"num_groups": 1}),
        ({"name": "loose", "num_groups": 3}, {"num_groups": 3, "bound": "loose"}),
        ({"name": "tight", "num_groups": 3}, {"num_groups": 3, "bound": "tight"}),
        (
            {"name": "tight", "num_groups": 3, "grouping": "contiguous"},
            {"num_groups": 3, "bound": "tight", "groups": CONTIGUOUS.repeat(7, axis=0)},
        ),
    ],
)
def test_the_objective_is_the_papers(options, reference):
    objective = build(**options)
    features, labels, head = batch = make_batch(7)
    loss = objective.loss(*batch, ())
    kernel, bias, x = (np.asarray(a, float) for a in (head["kernel"], head["bias"], features))
    expected = references.group_softmax_loss(x, np.asarray(labels), kernel, bias, **reference)
    assert float(loss.value) == pytest.approx(expected, rel=4 * FLOAT32)
    logits = x @ kernel + bias
    np.testing.assert_allclose(objective.logits(features, head, ()), logits, rtol=16 * FLOAT32)
    right = np.mean(logits.argmax(axis=1) == np.asarray(labels))
    assert float(loss.means["train_accuracy"]) == pytest.approx(right)


def make_batch(samples: int = 8):
    rng = np.random.default_rng(1)
    features, labels = rng.normal(size=(samples, DIM)), rng.integers(0, len(COUNTS), samples)
    kernel, bias = rng.normal(size=(DIM, len(COUNTS))), rng.normal(size=len(COUNTS))
    head = {"kernel": jnp.float32(kernel), "bias": jnp.float32(bias)}
    return jnp.float32(features), jnp.int32(labels), head


RANDOM: dict[str, Any] = {"name": "tight", "num_groups": 5, "grouping": "random"}


def test_random_groups_change_with_step_and_seed_alone():
    """A run that continues, or runs again, draws the same groups."""
    batch = make_batch()

    def values(seed):
        objective, found = build(seed, **RANDOM), []
        run, state = jax.jit(objective.loss), objective.init_state()
        for _ in range(3):
            value, state, _ = run(*batch, state)
            found.append(float(value))
        return found

    first = values(0)
    assert first == values(0)
    assert len({*first, *values(1)}) == 6
    softmax, whole = (
        float(build(name=name, num_groups=DIM).loss(*batch, ()).value)
        for name in ("softmax", "tight")
    )
    assert softmax < min(first) < max(first) < whole


@pytest.mark.parametrize("name", ["supcon", "proxy-anchor", "arcface"])
def test_other_losses_have_their_values_and_a_classifier_that_leaves_features_alone(name):
    objective, (features, labels, _) = build(name=name), make_batch()
    head = objective.init_head(jax.random.key(0))
    plain = {
        "supcon": lambda x: jaxloss.supervised_contrastive_loss(x, labels, temperature=0.1),
        "proxy-anchor": lambda x: jaxloss.proxy_anchor_loss(x, labels, head["proxies"]),
        "arcface": lambda x: jaxloss.margin_softmax_loss(
            jaxloss.cosine_logits(x, head["kernel"]), labels, scale=64.0, angular_margin=0.5
        ),
    }[name]
    found = jax.grad(lambda x: objective.loss(x, labels, head, ()).value)(features)
    expected = jax.grad(plain)(features)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    logits = objective.logits(features, head, ())
    beside = 0 if name == "arcface" else jaxloss.softmax_loss(logits, labels)
    value = objective.loss(features, labels, head, ()).value
    np.testing.assert_allclose(value, plain(features) + beside, rtol=1e-5)


@pytest.mark.long
def test_random_groups_do_not_depend_on_the_devices():
    features, labels, head = make_batch()
    one, spread = build(3, **RANDOM), build(3, "devices", **RANDOM)
    state = jnp.int32(2)
    expected = one.loss(features, labels, head, state)
    found = jax.pmap(lambda x, y: tuple(spread.loss(x, y, head, state)[:2]), axis_name="devices")(
        features.reshape(4, 2, DIM), labels.reshape(4, 2)
    )
    np.testing.assert_allclose(found[0], np.full(4, expected.value), rtol=FLOAT32)
    assert found[1].tolist() == [3] * 4


@pytest.mark.parametrize(
    ("options", "rank"),
    [
        ({"name": "softmax"}, 3),
        ({"name": "loose", "grouping": "contiguous"}, 15),  # 3 differences for each group.
        pytest.param({"name": "tight", "grouping": "random"}, 20, marks=pytest.mark.long),
    ],
)
def test_the_directions_of_the_gradient_are_logged(options, rank):
    """Of twice as many samples as features. Those of softmax are in the span of the classifier."""
    dim, rng = 20, np.random.default_rng(2)
    features, labels = rng.normal(size=(100, dim)), np.sort(rng.integers(0, len(COUNTS), 100))
    head = {"kernel": rng.normal(size=(dim, len(COUNTS))), "bias": rng.normal(size=len(COUNTS))}
    step = np.int32(3) if "random" in options.values() else ()
    outputs = Outputs(features.astype(np.float32), labels, lambda: np.zeros(0), COUNTS, step, head)
    found = protocol_of(num_groups=5, **options).diagnose(outputs)
    assert found["gradient_rank"] == rank
    if options["name"] != "softmax":
        assert found["gradient_outside_span"] > 0.05
        return
    errors = softmax(features @ head["kernel"] + head["bias"], axis=1) - np.eye(4)[labels]
    rows = np.linspace(0, 99, 2 * dim).astype(int)
    expected = gradient_directions((errors @ head["kernel"].T)[rows], head["kernel"])
    effective = found["gradient_effective_rank"], found["gradient_outside_span"]
    assert effective == pytest.approx((expected.effective_rank, 0), rel=16 * FLOAT32, abs=FLOAT32)


def test_softmax_ignores_the_groups_and_others_have_a_feature_for_each():
    """So that softmax can be a method of a sweep over G."""
    batch, plain = make_batch(), build(name="softmax", num_groups=1)
    options: dict[str, Any] = {"name": "softmax", "num_groups": DIM + 1, "grouping": "random"}
    protocol_of(**options).check_options(DIM)
    assert build(**options).init_state() == ()
    assert float(build(**options).loss(*batch, ()).value) == float(plain.loss(*batch, ()).value)
    protocol = protocol_of(**options | {"name": "loose"})
    protocol.check_options(DIM + 1)
    with pytest.raises(ConfigError, match=r"loss.num_groups = 11 must be at most 10, the num"):
        protocol.check_options(DIM)
