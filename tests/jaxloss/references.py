"""Float64 references of every loss, as slow loops over scalars written from the formulas.

A row that is masked or ignored is removed before a formula is evaluated, so that nothing here
shares the library's way of masking. A per-sample function gets the rows that are left and returns
one loss per row, or None where the loss is undefined. A loss that averages over terms returns the
sum of the terms of a row and their number.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np


def kept_rows(labels, where):
    """The indices of the rows that are neither padding nor ignored."""
    rows = []
    for i, label in enumerate(labels):
        masked = where is not None and not where[i]
        ignored = np.all(np.asarray(label, np.float64) < 0)
        if not masked and not ignored:
            rows.append(i)
    return rows


def reduce_rows(losses, num_rows, sample_weights, reduction):
    """Reduces the losses of the rows that count; `losses` maps a row to its loss or its terms."""
    weight = [1.0] * num_rows if sample_weights is None else [float(s) for s in sample_weights]
    per_row, total, number = [0.0] * num_rows, 0.0, 0.0
    for i, loss in losses.items():
        terms, size = loss if isinstance(loss, tuple) else (loss, 1)
        per_row[i] = weight[i] * terms / max(size, 1)
        total += weight[i] * terms
        number += weight[i] * size
    if reduction == "none":
        return np.array(per_row)
    if reduction == "sum":
        return np.float64(total)
    assert reduction == "mean"
    return np.float64(total / number if number else 0.0)


def over_rows(per_sample: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the common keywords to a per-sample function."""

    def loss(scored, labels, *shared, where=None, sample_weights=None, reduction="mean", **options):
        scored, labels = np.asarray(scored, np.float64), np.asarray(labels)
        rows = kept_rows(labels, where)
        values = per_sample(scored[rows], labels[rows], *shared, **options)
        losses = {i: value for i, value in zip(rows, values, strict=True) if value is not None}
        return reduce_rows(losses, len(labels), sample_weights, reduction)

    return loss


def over_each_row(of_row: Callable[..., Any]) -> Callable[..., Any]:
    """As `over_rows`, of a function `of_row(x, y)` of a row and its label or targets."""

    @over_rows
    def loss(scored, labels, *shared, **options):
        return [of_row(x, y, *shared, **options) for x, y in zip(scored, labels, strict=True)]

    return loss


def log_sum_exp(values):
    largest = max(values)
    return largest + math.log(sum(math.exp(value - largest) for value in values))


def product(a, b):
    return sum(float(p) * float(q) for p, q in zip(a, b, strict=True))


def norm(x):
    return math.hypot(*map(float, x))


def unit(x):
    length = norm(x)
    return [float(value) / length if length else 0.0 for value in x]


def squared_distance(a, b):
    return sum((float(p) - float(q)) ** 2 for p, q in zip(a, b, strict=True))


def distance(a, b, *, squared=False, normalize=True):
    if normalize:
        a, b = unit(a), unit(b)
    square = squared_distance(a, b)
    return square if squared else math.sqrt(square)


# Classification ----


def lowered(cosine, margin, angle):
    """The logit of the target, from its cosine."""
    if angle == 0:  # Then it need not be a cosine.
        return cosine - margin
    moved = math.acos(min(max(cosine, -1.0), 1.0)) + angle
    if moved < 0:
        return 1.0 - margin
    if moved > math.pi:
        return cosine + math.cos(angle) - 1.0 - margin
    sine = math.sqrt(max(1.0 - cosine**2, 1e-6))
    return cosine * math.cos(angle) - sine * math.sin(angle) - margin


def cross_entropies(
    logits,
    labels,
    *,
    margin=0.0,
    scale=1.0,
    label_smoothing=0.0,
    angular_margin=0.0,
    sample_margin=None,
    sample_angular_margin=None,
):
    def of(i, per_class, per_sample):
        value = per_class if np.ndim(per_class) == 0 else per_class[labels[i]]
        return value + (0.0 if per_sample is None else float(per_sample[i]))

    losses = []
    for i, (z, y) in enumerate(zip(logits, labels, strict=True)):
        z = list(map(float, z))
        if y < len(z):
            angle = of(i, angular_margin, sample_angular_margin)
            z[y] = lowered(z[y], of(i, margin, sample_margin), angle)
        scaled = [scale * z_c for z_c in z]
        target = scaled[y] if y < len(z) else math.nan
        smoothed = (1 - label_smoothing) * target + label_smoothing * sum(scaled) / len(z)
        losses.append(log_sum_exp(scaled) - smoothed)
    return losses


softmax_loss = over_rows(cross_entropies)
margin_softmax_loss = over_rows(cross_entropies)


def of_samples(scored):
    """The margins of `loss_table.sample_margins`."""
    return {"sample_margin": 0.25 * scored[:, 1], "sample_angular_margin": -0.5 * scored[:, 0]}


@over_rows
def sample_margins_margin_softmax_loss(logits, labels, **options):
    return cross_entropies(logits, labels, **of_samples(logits), **options)


@over_each_row
def sigmoid_loss(z, y):
    if np.ndim(y) == 0 and y >= len(z):
        return math.nan
    targets = y if np.ndim(y) else np.arange(len(z)) == y
    known = [(z_c, t) for z_c, t in zip(z, targets, strict=True) if t >= 0]
    # -log sigmoid(z) of a positive, -log(1 - sigmoid(z)) of a negative
    return sum(np.logaddexp(0.0, -z_c if t > 0 else z_c) for z_c, t in known)


def linear_logits(features, weights, bias=None):
    logits = np.zeros((len(features), weights.shape[1]))
    for i, x in enumerate(features):
        for c, w in enumerate(weights.T):
            logits[i, c] = product(x, w) + (0.0 if bias is None else float(bias[c]))
    return logits


def cosine_logits(features, weights):
    if weights.ndim == 3:
        each = [cosine_logits(features, weights[:, :, k]) for k in range(weights.shape[2])]
        return np.max(each, axis=0)
    logits = np.zeros((len(features), weights.shape[1]))
    for i, x in enumerate(features):
        for c, w in enumerate(weights.T):
            norms = norm(x) * norm(w)
            logits[i, c] = product(x, w) / norms if norms > 0 else 0.0
    return logits


@over_rows
def classifier_loss(features, labels, weights, bias=None, *, similarity="inner", **options):
    inner = similarity == "inner"
    logits = linear_logits(features, weights, bias) if inner else cosine_logits(features, weights)
    return cross_entropies(logits, labels, **options)


@over_rows
def sample_margins_classifier_loss(features, labels, weights, *, similarity, **options):
    assert similarity == "cosine"
    logits = cosine_logits(features, weights)
    return cross_entropies(logits, labels, **of_samples(features), **options)


# Metric losses ----


def of_each_anchor(of_anchor: Callable[..., Any]) -> Callable[..., Any]:
    """The losses of valid rows, from `of_anchor(x, y, rows, row_labels)` of a row and its label.

    The rows that it is compared with are valid references, or all other rows of the batch.
    """

    def values(features, labels, *, references=None, reference_labels=None, **options):
        losses = []
        for i, (x, y) in enumerate(zip(features, labels, strict=True)):
            rest = [j for j in range(len(labels)) if j != i]
            rows, row_labels = features[rest], labels[rest]
            if references is not None:
                rows, row_labels = references, np.asarray(reference_labels)
            losses.append(of_anchor(x, y, rows, row_labels, **options))
        return losses

    return values


@of_each_anchor
def nca_values(x, y, rows, row_labels, *, temperature=1.0):
    scores = [-squared_distance(x, row) / temperature for row in rows]
    same = [score for score, label in zip(scores, row_labels, strict=True) if label == y]
    return log_sum_exp(scores) - log_sum_exp(same) if same else None


@of_each_anchor
def prototypical_values(x, y, rows, row_labels, *, num_classes=None, temperature=1.0):
    if num_classes is not None and y >= num_classes:
        return math.nan
    logits = {}
    for c in sorted(set(row_labels.tolist())):
        members = rows[row_labels == c]
        mean = [sum(column) / len(members) for column in zip(*members, strict=True)]
        logits[c] = -squared_distance(x, mean) / temperature
    return log_sum_exp(list(logits.values())) - logits[y] if y in logits else None


def over_towers(values):
    """The references are those of `loss_table.towers`, without the masked rows."""

    @over_rows
    def loss(features, labels, **options):
        shifted = np.where(labels > 0, labels - 1, labels)
        return values(
            features, labels, references=-0.5 * features, reference_labels=shifted, **options
        )

    return loss


def overlap(a, b):
    """Whether two classes are equal, or the Jaccard overlap of two sets of classes."""
    if np.ndim(a) == 0:
        return float(a == b)
    both = either = 0
    for p, q in zip(a, b, strict=True):
        if p >= 0 and q >= 0:
            both += p > 0 and q > 0
            either += p > 0 or q > 0
    return both / either if either else 0.0


def pairs(x, y, rows, row_labels, *, normalize):
    """The (similarity, overlap) of the positives of an anchor, and those of its negatives."""
    ((*similarities,),) = (cosine_logits if normalize else linear_logits)([x], rows.T)
    found = [(s, overlap(y, label)) for s, label in zip(similarities, row_labels, strict=True)]
    return [pair for pair in found if pair[1] > 0], [pair for pair in found if pair[1] == 0]


@of_each_anchor
def supervised_contrastive_values(*anchor, temperature=0.1, denominator="all", normalize=True):
    positives, negatives = pairs(*anchor, normalize=normalize)
    others = positives + negatives if denominator == "all" else negatives
    total = weights = 0.0
    for s, weight in positives:
        competing = [other / temperature for other, _ in others]
        if denominator == "negatives":
            competing.append(s / temperature)
        total += weight * (log_sum_exp(competing) - s / temperature)
        weights += weight
    return total / weights if positives else None


@of_each_anchor
def multi_similarity_values(
    *anchor,
    positive_scale=2.0,
    negative_scale=50.0,
    threshold=0.5,
    mining_margin=None,
    normalize=True,
):
    positives, negatives = ([s for s, _ in side] for side in pairs(*anchor, normalize=normalize))
    if mining_margin is not None:
        least, most = min(positives, default=math.inf), max(negatives, default=-math.inf)
        positives = [s for s in positives if s < most + mining_margin]
        negatives = [s for s in negatives if s > least - mining_margin]
    loss = 0.0
    for scale, chosen in ((-positive_scale, positives), (negative_scale, negatives)):
        exponents = [scale * (s - threshold) for s in chosen]
        loss += log_sum_exp([0.0, *exponents]) / abs(scale)
    return loss


@of_each_anchor
def circle_values(*anchor, margin=0.4, scale=80.0, normalize=True):
    positives, negatives = pairs(*anchor, normalize=normalize)
    if not positives or not negatives:
        return None
    pull = [-scale * max(1 + margin - s, 0) * (s - (1 - margin)) for s, _ in positives]
    push = [scale * max(s + margin, 0) * (s - margin) for s, _ in negatives]
    return np.logaddexp(0.0, log_sum_exp(push) + log_sum_exp(pull))


@of_each_anchor
def triplet_values(x, y, rows, row_labels, *, margin=0.2, mining="hard", soft=False, **of_distance):
    """The sum of the terms of an anchor, and their number."""
    far = [(distance(x, row, **of_distance), z) for row, z in zip(rows, row_labels, strict=True)]
    same, rest = [d for d, z in far if z == y], [d for d, z in far if z != y]
    if not same or not rest:
        return None
    if mining == "hard":
        triplets = [(max(same), min(rest))]
    elif mining == "semihard":
        triplets = [(p, min((n for n in rest if n > p), default=max(rest))) for p in same]
    else:
        triplets = [(p, n) for p in same for n in rest]
    gaps = [p - n + margin for p, n in triplets]
    terms = [np.logaddexp(0.0, gap) if soft else max(gap, 0.0) for gap in gaps]
    return sum(terms), sum(term > 0 for term in terms) if mining == "all" else len(terms)


nca_loss = over_rows(nca_values)
prototypical_loss = over_rows(prototypical_values)
supervised_contrastive_loss = over_rows(supervised_contrastive_values)
multi_similarity_loss = over_rows(multi_similarity_values)
circle_loss = over_rows(circle_values)
triplet_loss = over_rows(triplet_values)
towers_nca_loss = over_towers(nca_values)
towers_prototypical_loss = over_towers(prototypical_values)
towers_supervised_contrastive_loss = over_towers(supervised_contrastive_values)
towers_multi_similarity_loss = over_towers(multi_similarity_values)
towers_circle_loss = over_towers(circle_values)
towers_triplet_loss = over_towers(triplet_values)


@of_each_anchor
def retrieved(x, y, rows, row_labels, *, ks, euclidean):
    near = [distance(x, row, normalize=not euclidean) for row in rows]
    hits = (row_labels == y)[np.argsort(near, kind="stable")].tolist()
    size = sum(hits)
    if not size:
        return None
    precisions = [sum(hits[: r + 1]) / (r + 1) * hits[r] for r in range(size)]
    recalls = [float(any(hits[:k])) for k in ks]
    return [*recalls, sum(hits[:size]) / size, sum(precisions) / size]


def retrieval_metrics(features, labels, ks, *, euclidean=False, **references):
    """Recall, R-precision and MAP@R of valid rows, with valid references."""
    values = retrieved(features, labels, ks=ks, euclidean=euclidean, **references)
    results = [value for value in values if value is not None]
    return np.mean(results, axis=0) if results else np.zeros(len(ks) + 2)


# Two towers ----


def tower_logits(queries, keys, *, ids=None, normalize=True):
    """The similarities, and which pairs take part."""
    similarities = (cosine_logits if normalize else linear_logits)(queries, keys.T)
    used = np.ones(similarities.shape, bool)
    if ids is not None:
        for i, j in itertools.permutations(range(len(queries)), 2):
            used[i, j] = ids[i] < 0 or ids[i] != ids[j]
    return similarities, used


def info_nce_values(queries, keys, *, temperature=0.07, symmetric=True, **of_towers):
    similarities, used = tower_logits(queries, keys, **of_towers)
    logits, losses = similarities / temperature, []
    for i in range(len(queries)):
        losses.append(log_sum_exp(logits[i, used[i]]) - logits[i, i])
        if symmetric:
            column = log_sum_exp(logits[used[:, i], i])
            losses[-1] = (losses[-1] + column - logits[i, i]) / 2
    return losses


def sigmoid_contrastive_values(queries, keys, *, scale=10.0, bias=-10.0, **of_towers):
    similarities, used = tower_logits(queries, keys, **of_towers)
    signs = 2 * np.eye(len(similarities), similarities.shape[1]) - 1
    terms = np.logaddexp(0.0, -signs * (scale * similarities + bias))
    return [sum(row[is_used]) for row, is_used in zip(terms, used, strict=True)]


def over_pairs(values):
    """The keys are those of `loss_table.paired`, and the ids are the labels."""

    @over_rows
    def loss(features, labels, *, further=False, **options):
        keys = -0.5 * np.roll(features, 1, axis=1)
        if further:
            keys = np.concatenate([keys, 2.0 * np.roll(features, 2, axis=1)])
        return values(features, keys, ids=labels, **options)

    return loss


paired_info_nce_loss = over_pairs(info_nce_values)
paired_sigmoid_contrastive_loss = over_pairs(sigmoid_contrastive_values)


# Subspaces ----


def classifier_projector(weights, epsilon=1e-4):
    """Eq. (vi), literally."""
    weights = np.asarray(weights, np.float64)
    gram = weights.T @ weights + epsilon * np.eye(weights.shape[1])
    return weights @ np.linalg.inv(gram) @ weights.T


def spectral_complement_projector(weights, power=0.3):
    """`1 - (lambda / max lambda)^p` in the full left basis, 1 for a null direction."""
    weights = np.asarray(weights, np.float64)
    basis, singular, _ = np.linalg.svd(weights, full_matrices=True)
    largest = singular.max()
    tolerance = largest * max(weights.shape) * np.finfo(np.float64).eps
    kept = np.ones(len(basis))
    for j, value in enumerate(singular):
        if value > tolerance:
            kept[j] = 1 - (value / largest) ** power
    return basis @ np.diag(kept) @ basis.T


def projection(projector):
    """`features` times `projector(weights, **options)`, row by row."""

    def project(features, weights, **options):
        matrix = projector(weights, **options)
        return np.stack([matrix @ x for x in np.asarray(features, np.float64)])

    return project


project_classifier = projection(classifier_projector)
project_complement = projection(
    lambda weights, **options: np.eye(len(weights)) - classifier_projector(weights, **options)
)
project_spectral_complement = projection(spectral_complement_projector)


def complement_gradients(
    features, weights, cotangent, *, epsilon: Any = None, power: Any = None, dtype=np.float64
):
    """Value, and gradients for features and weights, of a complement that filters W Wᵀ.

    The filter of an eigenvalue a is a / (a + epsilon) or (a / max a)^(power / 2), and 0 below the
    rank tolerance of `dtype`. Its derivative is that of Daleckii and Krein.
    """
    basis, singular, right = np.linalg.svd(np.asarray(weights, np.float64), full_matrices=True)
    padded = np.zeros(len(basis))
    tolerance = singular[0] * max(np.shape(weights)) * np.finfo(dtype).eps
    padded[: len(singular)] = np.where(singular > tolerance, singular, 0)
    values = padded**2

    def filtered(a):
        if epsilon is not None:
            return a / (a + epsilon)
        return (a / values[0]) ** (power / 2) if a > 0 else 0.0

    def quotient(a, b):
        if epsilon is not None:
            return epsilon / ((a + epsilon) * (b + epsilon))
        if max(a, b) == 0:
            return 0.0
        if abs(a - b) < 1e-8 * max(a, b):
            return power / 2 * filtered(a) / a
        return (filtered(a) - filtered(b)) / (a - b)

    weight = np.array([filtered(a) for a in values])
    inside = basis @ np.diag(weight) @ basis.T
    turned = (
        basis.T @ features.T @ cotangent @ basis + basis.T @ cotangent.T @ features @ basis
    ) / 2
    slope = np.array([[quotient(a, b) for b in values] for a in values]) * turned
    if power is not None:
        slope[0, 0] -= power / 2 / values[0] * np.sum(np.diagonal(turned) * weight)
    # W itself is not exactly orthogonal to its null directions, whose slope is 1 / epsilon.
    rank = len(singular)
    gradient = -2 * basis @ slope[:, :rank] @ np.diag(padded[:rank]) @ right[:rank]
    return features - features @ inside, cotangent - cotangent @ inside, gradient


def spectral_overlap(weights, power):
    """The spectral norm on the left-hand side of eq. (viii)."""
    projector = spectral_complement_projector(weights, power)
    return np.linalg.norm(np.asarray(weights, np.float64).T @ projector, 2)


# Sums of a classification loss and a metric loss ----


def integrated(project):
    """The sum whose metric loss sees `project(features, weights, **options)`."""

    def loss(
        features,
        labels,
        weights,
        bias=None,
        *,
        classification=softmax_loss,
        metric=nca_loss,
        metric_weight=1.0,
        basis_weights=None,
        where=None,
        sample_weights=None,
        reduction="mean",
        **options,
    ):
        common = {"where": where, "sample_weights": sample_weights, "reduction": reduction}
        rows = kept_rows(labels, where)
        clean = np.zeros_like(np.asarray(features, np.float64))
        clean[rows] = np.asarray(features, np.float64)[rows]
        projected = project(clean, weights if basis_weights is None else basis_weights, **options)
        first = classification(linear_logits(clean, weights, bias), labels, **common)
        return first + metric_weight * metric(projected, labels, **common)

    return loss


sum_loss = integrated(lambda features, weights: features)
direct_sum_loss = integrated(project_complement)
spectral_sum_loss = integrated(project_spectral_complement)


# Group softmax ----


def discriminativity(features, labels, weights):
    """The scores of eq. (A.14), from all ingredient logits [n, d, C]."""
    features, weights = np.asarray(features, np.float64), np.asarray(weights, np.float64)
    ingredients = features[:, :, None] * weights[None]
    scores = np.zeros(features.shape)
    for i, y in enumerate(labels):
        rivals = np.delete(ingredients[i], y, axis=1)
        scores[i] = ingredients[i, :, y]
        if rivals.shape[1]:
            scores[i] -= rivals.mean(axis=1)
    return scores


def ranked_groups(scores, num_groups):
    """The ranking of each row, with ties by index, cut into parts of nearly equal size."""
    groups = np.full(np.shape(scores), -1)
    for i, row in enumerate(scores):
        for g, part in enumerate(np.array_split(np.argsort(row, kind="stable"), num_groups)):
            groups[i, part] = g
    return groups


def group_softmax_loss(
    features, labels, weights, bias=None, *, num_groups, bound="loose", groups=None, **common
):
    """Eq. (A.2), with explicit sums over the features of a group."""
    classes = weights.shape[1]
    bias = np.zeros(classes) if bias is None else bias
    rows = kept_rows(labels, common.get("where"))
    if groups is not None:
        groups = np.asarray(groups)[rows]
    sharpness = {"loose": 1, "tight": num_groups}[bound]

    @over_rows
    def loss(features, labels):
        known = [i for i, y in enumerate(labels) if y < classes]
        grouping = groups
        if grouping is None:
            grouping = np.zeros(features.shape, int)
            scores = discriminativity(features[known], labels[known], weights)
            grouping[known] = ranked_groups(scores, num_groups)
        losses = [math.nan] * len(labels)
        for i in known:
            losses[i] = 0.0
            for g in range(num_groups):
                members = grouping[i] == g
                logits = [
                    sharpness * (product(features[i, members], w[members]) + b / num_groups)
                    for w, b in zip(weights.T, bias, strict=True)
                ]
                losses[i] += (log_sum_exp(logits) - logits[labels[i]]) / sharpness
        return losses

    return loss(features, labels, **common)


# Prototypes on the sphere ----


def of_targets(value):
    """The loss of each row: `value` of x·q, ‖x‖ and ‖q‖, with the prototype q of its class."""

    @over_each_row
    def loss(x, y, prototypes, *, assignment=None, lengths=None):
        columns = range(prototypes.shape[1]) if assignment is None else assignment
        if y >= len(columns) or not 0 <= columns[y] < prototypes.shape[1]:
            return math.nan
        length = 1.0 if lengths is None else float(lengths[y])
        q = [float(p) * length for p in prototypes[:, columns[y]]]
        return value(product(x, q), norm(x), norm(q))

    return loss


@of_targets
def prototype_loss(xq, x, q):
    return (1 - (xq / (x * q) if x * q > 0 else 0.0)) ** 2


@of_targets
def dot_regression_loss(xq, x, q):
    return (xq - q * x) ** 2 / (2 * x) if x > 0 else 0.0


def class_means(old, features, labels, *, decay=0.9, where=None):
    new = np.array(old, np.float64)
    rows = kept_rows(labels, where)
    for c in range(new.shape[1]):
        members = [np.asarray(features[i], np.float64) for i in rows if labels[i] == c]
        if members:
            mean = unit(np.sum(members, axis=0))
            new[:, c] = unit(decay * new[:, c] + (1 - decay) * np.array(mean))
    return new


def class_balanced_lengths(labels, num_classes, *, where=None):
    known = [int(labels[i]) for i in kept_rows(labels, where) if labels[i] < num_classes]
    lengths = []
    for c in range(num_classes):
        size = known.count(c)
        lengths.append(math.sqrt(len(known) / len(set(known)) / size) if size else 1.0)
    return np.array(lengths)


# Multi-label ----


def _two_sided(
    scores, targets, weights, *, positive_temperature=4.0, negative_temperature=1.0, margin=0.0
):
    """softplus of the hardest negative minus the hardest positive; None without a positive."""

    def side(sign, temperature, belongs):
        exponents = [
            sign * float(x) / temperature + math.log(s)
            for x, t, s in zip(scores, targets, weights, strict=True)
            if belongs(t) and s != 0
        ]
        return temperature * log_sum_exp(exponents) if exponents else None

    positive = side(-1, positive_temperature, lambda t: t > 0)
    negative = side(1, negative_temperature, lambda t: t == 0)
    if positive is None:
        return None
    return 0.0 if negative is None else np.logaddexp(0.0, negative + positive + margin)


@over_each_row
def sample_wise_loss(logits, targets, **hyperparameters):
    return _two_sided(logits, targets, np.ones(len(logits)), **hyperparameters)


def class_wise_loss(
    logits, targets, *, where=None, sample_weights=None, reduction="mean", **hyperparameters
):
    rows = kept_rows(targets, where)
    weights = np.ones(len(rows)) if sample_weights is None else np.asarray(sample_weights)[rows]
    losses = {}
    for c in range(targets.shape[1]):
        loss = _two_sided(logits[rows, c], targets[rows, c], weights, **hyperparameters)
        if loss is not None:
            losses[c] = loss
    return reduce_rows(losses, targets.shape[1], None, reduction)


def two_way_loss(logits, targets, **options):
    assert options.get("reduction") != "none"
    return class_wise_loss(logits, targets, **options) + sample_wise_loss(
        logits, targets, **options
    )


@over_each_row
def multilabel_softmax_loss(x, t):
    log_total = log_sum_exp([float(x[c]) for c in range(len(x)) if t[c] >= 0])
    whole = sum(float(t[c]) for c in range(len(x)) if t[c] > 0)
    terms = [t[c] / whole * (log_total - x[c]) for c in range(len(x)) if t[c] > 0]
    return sum(terms) if terms else None


@over_each_row
def asymmetric_loss(x, t, *, positive_focus=0.0, negative_focus=4.0, clip=0.05):
    loss = 0.0
    for z, kind in zip(x, t, strict=True):
        p, not_p = np.exp(-np.logaddexp(0.0, -z)), np.exp(-np.logaddexp(0.0, z))
        if kind > 0:
            loss += not_p**positive_focus * np.logaddexp(0.0, -z)
        elif kind == 0 and p > clip:
            minus_log = np.logaddexp(0.0, z) if clip == 0 else -math.log(not_p + clip)
            loss += (p - clip) ** negative_focus * minus_log
    return loss


@over_each_row
def warp_loss(x, t):
    loss = 0.0
    for p in np.flatnonzero(t > 0):
        hinges = [1 - x[p] + x[k] for k in np.flatnonzero(t == 0)]
        inside = [float(hinge) for hinge in hinges if hinge > 0]
        if inside:
            harmonic = sum(1 / j for j in range(1, len(inside) + 1))
            loss += harmonic * sum(inside) / len(inside)
    return loss


@over_each_row
def robust_multilabel_loss(x, t, *, ramp=-0.8, leak=0.1, binary_weight=5.0):
    def leaky_ramp(t):
        return float(1 - t if t > ramp else 1 - ramp + leak * (ramp - t)) if t < 1 else 0.0

    loss = 0.0
    for c in np.flatnonzero(t >= 0):
        loss += binary_weight * leaky_ramp(x[c] if t[c] > 0 else -x[c])
    for p in np.flatnonzero(t > 0):
        gaps = [x[p] - x[k] for k in np.flatnonzero(t == 0)]
        rank = sum(gap < 1 for gap in gaps)
        loss += sum(1 / j for j in range(1, rank + 1)) * sum(map(leaky_ramp, gaps))
    return loss


# Proxies ----


def proxy_anchor_loss(
    features,
    labels,
    proxies,
    *,
    margin=0.1,
    scale=32.0,
    where=None,
    sample_weights=None,
    reduction="mean",
):
    """The two sums over the samples of each class, a sample of weight s counted s times."""
    rows, classes = kept_rows(labels, where), range(proxies.shape[1])
    cosines = cosine_logits(np.asarray(features)[rows], proxies)
    weights = np.ones(len(rows)) if sample_weights is None else np.asarray(sample_weights)[rows]
    pulls, pushes = [], []
    for c in classes:
        own = np.array([labels[i] == c for i in rows], bool)
        pull = weights[own] * np.exp(-scale * (cosines[own, c] - margin))
        push = weights[~own] * np.exp(scale * (cosines[~own, c] + margin))
        if own.any():
            pulls.append(math.log1p(sum(pull)))
        pushes.append(math.log1p(sum(push)))
    if reduction == "sum":
        return np.float64(sum(pulls) + sum(pushes))
    return np.float64(sum(pulls) / max(len(pulls), 1) + sum(pushes) / len(pushes))


@over_each_row
def proxy_nca_loss(x, y, proxies, *, temperature=1 / 9, include_own=True):
    scores = [-distance(x, p, squared=True) / temperature for p in proxies.T]
    if y >= len(scores):
        return math.nan
    others = [score for c, score in enumerate(scores) if include_own or c != y]
    return log_sum_exp(others) - scores[y]


# Two views ----


def second_view(features):
    """The view that `loss_table.views` makes."""
    return np.asarray(features)[:, ::-1] * np.linspace(0.5, 1.5, np.shape(features)[1])


def of_views(values):
    """A loss of features and labels, of which a negative one is padding, and of a second view."""

    def loss(features, labels, *, where=None, sample_weights=None, reduction="mean", **options):
        rows = kept_rows(labels, where)
        weights = np.ones(len(labels)) if sample_weights is None else np.asarray(sample_weights)
        first, second = np.asarray(features)[rows], second_view(features)[rows]
        value = values(first, second, weights[rows], **options) if rows else 0.0
        return np.float64(value * (sum(weights[rows]) if reduction == "sum" else 1.0))

    return loss


def covariances(*views, weights, ddof=0):
    """Of all dimensions. Deviations of equal numbers are exactly 0."""
    shifted = np.concatenate([view - view[0] for view in views], axis=1)
    return np.cov(shifted.T, aweights=weights, ddof=ddof)


def vicreg_values(
    first, second, weights, *, invariance=25.0, variance=25.0, covariance=1.0, epsilon=1e-4
):
    dim = first.shape[1]
    squared = [s * squared_distance(a, b) for s, a, b in zip(weights, first, second, strict=True)]
    value = invariance * sum(squared) / sum(weights) / dim
    if len(weights) < 2:
        return value
    for view in (first, second):
        matrix = covariances(view, weights=weights, ddof=1)
        spreads = np.sqrt(np.diag(matrix) + epsilon)
        value += variance * np.mean(np.maximum(0, 1 - spreads))
        value += covariance * np.sum((matrix - np.diag(np.diag(matrix))) ** 2) / dim
    return value


def barlow_twins_values(first, second, weights, *, off_diagonal=5e-3):
    dim, value = first.shape[1], 0.0
    matrix = covariances(first, second, weights=weights)
    spreads = np.sqrt(np.diag(matrix))
    for j in range(dim):
        for k in range(dim):
            scale = spreads[j] * spreads[dim + k]
            correlation = matrix[j, dim + k] / scale if scale > 0 else 0.0
            value += (1 - correlation) ** 2 if j == k else off_diagonal * correlation**2
    return value


views_vicreg_loss = of_views(vicreg_values)
views_barlow_twins_loss = of_views(barlow_twins_values)


# Diagnostics ----


def discriminability(features, labels, *, where=None):
    """Half the mean squared distance of normalised pairs, (intra, inter), by a loop over pairs."""
    intra, inter = [], []
    for i, j in itertools.combinations(kept_rows(labels, where), 2):
        half = distance(features[i], features[j], squared=True) / 2
        (intra if labels[i] == labels[j] else inter).append(half)
    return (
        sum(intra) / len(intra) if intra else 0.0,
        sum(inter) / len(inter) if inter else 0.0,
    )
