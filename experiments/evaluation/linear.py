"""Linear evaluation: softmax classifiers on frozen features, for many weights of regularisation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from experiments.evaluation.classification import Values, class_accuracies
from jaxloss.core.products import wide_product as product

PENALTIES = np.logspace(-6, 5, 45)
"""The weights of the L2 regularisation of Kobayashi (CVPR 2023, supplement B)."""

_TOLERANCE = 1e-6  # Share of the objective by which a solution may be above the minimum.
_PATIENCE = 5  # Iterations in a row without a measurable decrease after which a solve gives up.
_LEAST_STEPS = 4  # Steps before the curvature that L-BFGS has seen is trusted.


class Labelled(NamedTuple):
    """Features of samples and their classes."""

    features: Values  # Floats [n, d], finite.
    labels: Values  # Integers [n], from 0 to C − 1.


class Classifiers(NamedTuple):
    """The classifiers of L penalties, in their order."""

    kernels: np.ndarray  # [L, d, C].
    biases: np.ndarray  # [L, C].
    objectives: np.ndarray  # [L]: mean cross-entropy + λ/(2n) ‖W‖².
    iterations: np.ndarray
    converged: np.ndarray  # Whether they met the tolerance.

    def accuracies(self, data: Labelled) -> np.ndarray:
        """The accuracy of each on samples of the same classes: float32 [L]."""
        return (np.asarray(_predict(self, data)) == data.labels).mean(1, dtype=np.float32)


def fit_classifiers(
    data: Labelled,
    num_classes: int,
    *,
    penalties: Values | Sequence[float] = PENALTIES,
    max_iterations: int = 1000,
) -> Classifiers:
    r"""Softmax classifiers for many weights of the L2 regularisation, by L-BFGS in one program.

    .. math:: \min_{W, b} \; -\sum_i \log \mathrm{softmax}_{y_i}(W^\top x_i + b)
       + \frac{λ}{2} \|W\|^2

    So λ is 1/C of scikit-learn's `LogisticRegression`. Penalties are solved one after the other
    from the largest to the smallest, each from the solution before it. A solve ends where the
    objective is above its minimum by at most a millionth of it, as estimated by ½ gᵀHg: gradient,
    and inverse curvature that L-BFGS has seen. The features are centred, scaled by one number and
    turned onto their principal axes, each of which is stretched by an estimate of its curvature, so
    that L-BFGS takes fewer steps. Source: Kobayashi, Two-Way Multi-Label Loss, CVPR 2023,
    supplement B.
    """
    typed = np.asarray(data.features, np.float32), np.asarray(data.labels).astype(np.int32)
    penalties = np.asarray(penalties, np.float32)
    order = np.argsort(-penalties, kind="stable")
    solved = _solve(*typed, penalties[order], max_iterations, num_classes=num_classes)
    back = np.argsort(order, kind="stable")
    return Classifiers(*(np.asarray(part)[back] for part in solved))


def evaluate_linear(
    train: Labelled,
    validation: Labelled,
    test: Labelled,
    *,
    penalties: Values | Sequence[float] = PENALTIES,
) -> dict[str, Any]:
    """Transfer to a data set by linear classifiers, as JSON types; accuracies in [0, 1].

    Classifiers of the training set choose the `penalty` on the validation set, of equally good ones
    the largest; those of both sets give the results on the test set. `best_test_penalty` and its
    accuracy are chosen on the test set, as in the paper. `validation` and `test` have the accuracy
    of the training set's classifiers for each of the `penalties`.
    """
    num_classes = 1 + max(int(np.max(part.labels)) for part in (train, validation, test))
    both = Labelled(*(np.concatenate(parts) for parts in zip(train, validation, strict=True)))
    of_train, of_both = (
        fit_classifiers(data, num_classes, penalties=penalties) for data in (train, both)
    )
    on_validation, on_test = of_train.accuracies(validation), of_train.accuracies(test)
    of_all, penalties = of_both.accuracies(test), np.asarray(penalties, np.float64)
    best, best_test = (
        float(penalties[values == values.max()].max()) for values in (on_validation, of_all)
    )
    at = int(np.flatnonzero(penalties == best)[0])
    predictions = np.asarray(_predict(of_both, test))[at]
    per_class = class_accuracies(predictions, test.labels, num_classes)
    return {
        "penalty": best,
        "validation_accuracy": float(on_validation.max()),
        "accuracy": float((predictions == test.labels).mean()),
        "class_mean_accuracy": float(np.nanmean(per_class)),
        "converged": bool(of_both.converged[at]),
        "best_test_penalty": best_test,
        "best_test_accuracy": float(of_all.max()),
        "penalties": penalties.tolist(),
        "validation": on_validation.tolist(),
        "test": on_test.tolist(),
        "unconverged": int((~of_train.converged).sum() + (~of_both.converged).sum()),
        "train_samples": len(train.labels),
        "validation_samples": len(validation.labels),
        "test_samples": len(test.labels),
    }


@jax.jit
def _predict(classifiers: Classifiers, data: Labelled) -> Array:
    """The predictions [L, n] of every classifier, of equal logits the first."""
    features, each = jnp.asarray(data.features, jnp.float32), classifiers[:2]
    return lax.map(lambda of: (product(features, of[0]) + of[1]).argmax(1), each)


@partial(jax.jit, static_argnames="num_classes")
def _solve(
    features: Array,
    labels: Array,
    penalties: Array,
    max_iterations: Array | int,
    *,
    num_classes: int,
) -> tuple[Array, ...]:
    """The fields of `Classifiers` for falling penalties."""
    count, dim = features.shape
    mean = features.mean(0)
    features = features - mean
    size = jnp.sqrt(jnp.mean(features**2))
    size = jnp.where(size > 0, size, 1)
    features = features / size
    axes = jnp.linalg.eigh(product(features.T, features))[1]
    features = product(features, axes)
    variances = jnp.mean(features**2, axis=0)
    is_target = labels[:, None] == jnp.arange(num_classes)

    def solve(start: Any, penalty: Array) -> tuple[Any, tuple[Array, ...]]:
        # In units of the scaled features and beside the mean of the cross-entropy.
        weight = penalty / (count * size**2)
        kernel, bias = start
        shares = jax.nn.softmax(product(features, kernel) + bias)
        # The mean curvature of the cross-entropy in a logit; above 0 where all samples are right.
        curvature = jnp.maximum(jnp.mean(shares * (1 - shares)), 1e-12)
        stretch = lax.rsqrt(curvature * variances + weight)[:, None], lax.rsqrt(curvature)

        def objective(position):
            kernel, bias = jax.tree.map(jnp.multiply, stretch, position)
            values = _cross_entropy(product(features, kernel) + bias, is_target)
            return jnp.mean(values) + weight / 2 * jnp.sum(kernel**2)

        position = jax.tree.map(jnp.divide, start, stretch)
        position, value, iterations, converged = _minimise(objective, position, max_iterations)
        kernel, bias = jax.tree.map(jnp.multiply, stretch, position)
        original = product(axes, kernel) / size
        outputs = original, bias - product(mean, original), value, iterations, converged
        return (kernel, bias), outputs

    nothing = jnp.zeros((dim, num_classes)), jnp.zeros(num_classes)
    return lax.scan(solve, nothing, penalties)[1]


def _cross_entropy(logits: Array, is_target: Array) -> Array:
    """`log(1 + Σ_{c≠y} e^{z_c − z_y})` [n], which keeps its digits where it is close to 0."""
    target = jnp.sum(jnp.where(is_target, logits, 0), axis=1, keepdims=True)
    gaps = jnp.where(is_target, -jnp.inf, logits - target)
    return jax.nn.softplus(jax.nn.logsumexp(gaps, axis=1))


class _Search(NamedTuple):
    position: Any
    state: Any
    value: Array
    excess: Array
    """½ gᵀHg before the last step: how far the value was above its minimum, by what L-BFGS has seen
    of the curvature."""
    idle: Array
    """Iterations since the last measurable decrease."""
    iterations: Array

    @property
    def is_open(self) -> Array:
        """Whether the value may be above its minimum by more than the tolerance."""
        return (self.iterations < _LEAST_STEPS) | (self.excess > _TOLERANCE * self.value)


def _minimise(
    objective: Any, position: Any, max_iterations: Array | int
) -> tuple[Any, Array, Array, Array]:
    """L-BFGS until the excess is small: position, value, iterations and whether it is."""
    solver = optax.lbfgs()
    value_and_gradient = optax.value_and_grad_from_state(objective)

    def go_on(search: _Search) -> Array:
        patient = (search.idle < _PATIENCE) & (search.iterations < max_iterations)
        return search.is_open & patient

    def step(search: _Search) -> _Search:
        value, gradient = value_and_gradient(search.position, state=search.state)
        updates, state = solver.update(
            gradient, search.state, search.position, value=value, grad=gradient, value_fn=objective
        )
        reached = jnp.asarray(optax.tree.get(state, "value"))
        rate = jnp.asarray(optax.tree.get(state, "learning_rate"))
        gained = reached < value - jnp.finfo(reached.dtype).eps * jnp.abs(value)
        return _Search(
            position=optax.apply_updates(search.position, updates),
            state=state,
            value=reached,
            excess=-jnp.asarray(optax.tree.vdot(gradient, updates)) / rate / 2,
            idle=jnp.where(gained, 0, search.idle + 1),
            iterations=search.iterations + 1,
        )

    unknown, nothing = jnp.array(jnp.inf), jnp.zeros((), jnp.int32)
    start = _Search(position, solver.init(position), unknown, unknown, nothing, nothing)
    found = lax.while_loop(go_on, step, start)
    return found.position, found.value, found.iterations, ~found.is_open
