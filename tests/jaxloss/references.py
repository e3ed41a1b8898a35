"""Float64 references of every loss in NumPy, written from the formulas, row by row.

A row that is masked or ignored is removed before a formula is evaluated, so that nothing here
shares the library's way of masking. A per-sample function gets the rows that are left and returns
one loss per row, or None where the loss is undefined. A loss that averages over terms returns the
sum of the terms of a row and their number.

With another `asarray`, what removes rows and reduces their losses is that of `torch_references`,
whose formulas are written another way.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

PER_ROW = (
    *("sample_margin", "sample_angular_margin", "groups"),
    *("guide", "own_keys", "own_key_where", "own_key_guide", "teacher"),
    "targets",
)
"""The options that have a value for each row."""

log_sum_exp = np.logaddexp.reduce


def kept_rows(labels, where=None):
    """The indices of the rows that are neither padding nor ignored."""
    labels = np.asarray(labels)
    known = labels >= 0 if labels.ndim == 1 else (labels >= 0).any(axis=1)
    return np.flatnonzero(known if where is None else known & np.asarray(where))


def reduce_rows(losses, num_rows, sample_weights, reduction, asarray: Any = np.asarray):
    """Reduces the losses of the rows that count; `losses` maps a row to its loss or its terms."""
    weight = [1.0] * num_rows if sample_weights is None else sample_weights
    per_row, total, number = [0.0] * num_rows, 0.0, 0.0
    for i, loss in losses.items():
        terms, size = loss if isinstance(loss, tuple) else (loss, 1)
        per_row[i] = weight[i] * terms / max(size, 1)
        total += weight[i] * terms
        number += weight[i] * size
    if reduction == "none":
        return asarray(per_row)
    assert reduction in ("mean", "sum")
    return asarray(total if reduction == "sum" else total / number if number else 0.0)


def over_rows(per_sample: Callable[..., Any], asarray: Any = np.asarray) -> Callable[..., Any]:
    """Adds the common keywords to a per-sample function."""

    def loss(scored, labels, *shared, where=None, sample_weights=None, reduction="mean", **options):
        scored, labels = asarray(scored, dtype=float), asarray(labels)
        rows = kept_rows(labels, where)
        for name in options.keys() & PER_ROW:
            options[name] = asarray(options[name])[rows]
        values = per_sample(scored[rows], labels[rows], *shared, **options)
        losses = {i: value for i, value in zip(rows, values, strict=True) if value is not None}
        return reduce_rows(losses, len(labels), sample_weights, reduction, asarray)

    return loss


def over_each_row(of_row: Callable[..., Any], asarray: Any = np.asarray) -> Callable[..., Any]:
    """As `over_rows`, of a function `of_row(x, y)` of a row and its label or targets."""

    def values(scored, labels, *shared, **options):
        return [of_row(x, y, *shared, **options) for x, y in zip(scored, labels, strict=True)]

    return over_rows(values, asarray)


def unit(x):
    """Vectors divided by their length; a zero vector stays zero."""
    x = np.asarray(x, np.float64)
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.where(length > 0, length, 1)


def distances(x, rows, *, squared=False, normalize=True):
    if normalize:
        x, rows = unit(x), unit(rows)
    squares = np.sum((x - rows) ** 2, axis=1)
    return squares if squared else np.sqrt(squares)


def similarities(x, rows, similarity="cosine"):
    """Of each of x and each of the rows."""
    if similarity == "cosine":
        x, rows = unit(x), unit(rows)
    if similarity in ("cosine", "inner"):
        return x @ rows.T
    squares = np.sum((x[:, None] - rows) ** 2, axis=2)
    return -(squares if similarity == "negative_squared_distance" else np.sqrt(squares))


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
    targets=None,
    logsumexp_penalty=0.0,
):
    def of(i, per_class, per_sample):
        value = per_class if np.ndim(per_class) == 0 else per_class[labels[i]]
        return value + (0.0 if per_sample is None else float(per_sample[i]))

    losses = []
    for i, (z, y) in enumerate(zip(logits, labels, strict=True)):
        scaled, target = scale * z, math.nan
        if y < len(z):
            angle = of(i, angular_margin, sample_angular_margin)
            target = scaled[y] = scale * lowered(z[y], of(i, margin, sample_margin), angle)
        mass, log_sum = 1.0, log_sum_exp(scaled)
        if targets is not None:
            mass, target = np.sum(targets[i]), np.sum(targets[i] * scaled)
        smoothed = (1 - label_smoothing) * target + label_smoothing * mass * np.mean(scaled)
        losses.append(mass * log_sum - smoothed + logsumexp_penalty * log_sum**2)
    return losses


softmax_loss = over_rows(cross_entropies)
margin_softmax_loss = over_rows(cross_entropies)


@over_each_row
def sigmoid_loss(z, y):
    if np.ndim(y) == 0 and y >= len(z):
        return math.nan
    targets = y if np.ndim(y) else np.arange(len(z)) == y
    # -log sigmoid(z) of a positive, -log(1 - sigmoid(z)) of a negative
    return np.sum(np.logaddexp(0.0, np.where(targets > 0, -z, z)), where=targets >= 0)


def linear_logits(features, weights, bias=None):
    logits = np.asarray(features, np.float64) @ np.asarray(weights, np.float64)
    return logits + (0.0 if bias is None else np.asarray(bias))


def cosine_logits(features, weights):
    if weights.ndim == 3:
        return np.max([cosine_logits(features, w) for w in np.moveaxis(weights, 2, 0)], axis=0)
    return unit(features) @ unit(weights.T).T


@over_rows
def classifier_loss(
    features, labels, weights, bias=None, *, similarity="inner", soft_cap=None, **options
):
    inner = similarity == "inner"
    logits = linear_logits(features, weights, bias) if inner else cosine_logits(features, weights)
    logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
    return cross_entropies(logits, labels, **options)


# Metric losses ----


def of_each_anchor(of_anchor: Callable[..., Any]) -> Callable[..., Any]:
    """The losses of valid rows, from `of_anchor(x, y, rows, row_labels)` of a row and its label.

    The rows that it is compared with are valid references, or all other rows of the batch.
    """

    def values(
        features,
        labels,
        *,
        references=None,
        reference_labels: Any = None,
        reference_where=None,
        **options,
    ):
        losses = []
        for i, (x, y) in enumerate(zip(features, labels, strict=True)):
            rows, row_labels, kept = features, labels, np.arange(len(labels)) != i
            if references is not None:
                rows, row_labels = references, reference_labels
                kept = kept_rows(row_labels, reference_where)
            losses.append(of_anchor(x, y, rows[kept], row_labels[kept], **options))
        return losses

    return values


def over_anchors(of_anchor: Callable[..., Any]) -> Callable[..., Any]:
    return over_rows(of_each_anchor(of_anchor))


@over_anchors
def nca_loss(x, y, rows, row_labels, *, temperature=1.0):
    scores, same = -np.sum((x - rows) ** 2, axis=1) / temperature, row_labels == y
    return log_sum_exp(scores) - log_sum_exp(scores[same]) if same.any() else None


@over_anchors
def prototypical_loss(x, y, rows, row_labels, *, num_classes=None, temperature=1.0):
    if num_classes is not None and y >= num_classes:
        return math.nan
    logits = {
        c: -np.sum((x - rows[row_labels == c].mean(axis=0)) ** 2) / temperature
        for c in set(row_labels.tolist())
    }
    return log_sum_exp(list(logits.values())) - logits[y] if y in logits else None


def overlaps(y, labels):
    """Whether classes are equal, or the Jaccard overlaps of sets of classes."""
    if labels.ndim == 1:
        return (labels == y).astype(float)
    known = (y >= 0) & (labels >= 0)
    both = np.sum(known & (y > 0) & (labels > 0), axis=1)
    return both / np.maximum(np.sum(known & ((y > 0) | (labels > 0)), axis=1), 1)


def pairs(x, y, rows, row_labels, *, similarity):
    """The similarities of an anchor, and the overlaps of the labels: those of positives are > 0."""
    return similarities(x[None], rows, similarity)[0], overlaps(y, row_labels)


@over_anchors
def supervised_contrastive_loss(*anchor, temperature=0.1, denominator="all", similarity="cosine"):
    s, weights = pairs(*anchor, similarity=similarity)
    logits, positive = s / temperature, weights > 0
    if not positive.any():
        return None
    totals = log_sum_exp(logits)
    if denominator == "negatives":
        totals = np.logaddexp(log_sum_exp(logits[~positive]), logits[positive])
    return np.average(totals - logits[positive], weights=weights[positive])


@over_anchors
def multi_similarity_loss(
    *anchor,
    positive_scale=2.0,
    negative_scale=50.0,
    threshold=0.5,
    mining_margin=None,
    similarity="cosine",
):
    s, weights = pairs(*anchor, similarity=similarity)
    positives, negatives = s[weights > 0], s[weights == 0]
    if mining_margin is not None:
        least, most = min(positives, default=math.inf), max(negatives, default=-math.inf)
        positives = positives[positives < most + mining_margin]
        negatives = negatives[negatives > least - mining_margin]
    loss = 0.0
    for scale, chosen in ((-positive_scale, positives), (negative_scale, negatives)):
        loss += log_sum_exp([0.0, *(scale * (chosen - threshold))]) / abs(scale)
    return loss


@over_anchors
def circle_loss(*anchor, margin=0.4, scale=80.0, similarity="cosine"):
    s, weights = pairs(*anchor, similarity=similarity)
    positives, negatives = s[weights > 0], s[weights == 0]
    if not len(positives) or not len(negatives):
        return None
    pull = -scale * np.maximum(1 + margin - positives, 0) * (positives - (1 - margin))
    push = scale * np.maximum(negatives + margin, 0) * (negatives - margin)
    return np.logaddexp(0.0, log_sum_exp(push) + log_sum_exp(pull))


@over_anchors
def triplet_loss(x, y, rows, row_labels, *, margin=0.2, mining="hard", soft=False, **of_distance):
    """The sum of the terms of an anchor, and their number."""
    far = distances(x, rows, **of_distance)
    same, rest = far[row_labels == y], far[row_labels != y]
    if not len(same) or not len(rest):
        return None
    if mining == "hard":
        gaps = max(same) - min(rest)
    elif mining == "semihard":
        gaps = same - [min((n for n in rest if n > p), default=max(rest)) for p in same]
    else:
        gaps = same[:, None] - rest
    terms = (np.logaddexp if soft else np.maximum)(0.0, gaps + margin)
    return np.sum(terms), np.count_nonzero(terms) if mining == "all" else np.size(terms)


@of_each_anchor
def retrieved(x, y, rows, row_labels, *, ks, euclidean):
    """The mean over all orders of the rows that are equally near."""
    near = np.round(distances(x, rows, normalize=not euclidean), 9)
    is_hit = (row_labels == y).tolist()
    size = sum(is_hit)
    if not size:
        return None

    def of_order(hits):
        precisions = [sum(hits[: r + 1]) / (r + 1) * hits[r] for r in range(size)]
        recalls = [float(any(hits[:k])) for k in ks]
        return [*recalls, sum(hits[:size]) / size, sum(precisions) / size]

    tied = [np.flatnonzero(near == distance) for distance in np.unique(near)]
    orders = itertools.product(*map(itertools.permutations, tied))
    return np.mean([of_order([is_hit[k] for part in order for k in part]) for order in orders], 0)


def retrieval_metrics(features, labels, ks, *, where=None, euclidean=False, **references):
    """Recall, R-precision and MAP@R, of the rows that have a reference of their class."""
    rows = kept_rows(labels, where)
    values = retrieved(features[rows], labels[rows], ks=ks, euclidean=euclidean, **references)
    results = [value for value in values if value is not None]
    return np.mean(results, axis=0) if results else np.zeros(len(ks) + 2)


def unlabelled(per_sample, over_rows=over_rows):
    """A loss of features alone, from the losses of those that are not padding."""

    @over_rows
    def of_rows(features, _, **options):
        return per_sample(features, **options)

    return lambda features, **options: of_rows(features, np.zeros(len(features), int), **options)


@unlabelled
def koleo_loss(features, epsilon=1e-8, neighbors=1):
    if len(features) < 2:
        return [None] * len(features)
    gaps = -similarities(unit(features), unit(features), "negative_distance")
    np.fill_diagonal(gaps, np.inf)
    nearest = np.sort(gaps, axis=1)[:, : min(neighbors, len(gaps) - 1)]
    return list(np.mean(-np.log(nearest + epsilon), axis=1))


# Candidates of a query ----


def over_candidates(of_query: Callable[..., Any], over_rows: Any = over_rows) -> Any:
    """Of a function of a query's scores and those of a teacher, at the candidates that count."""

    @over_rows
    def of_rows(scores, _, teacher, used, **options):
        rows = zip(scores, teacher, used, strict=True)
        return [of_query(s, t, np.flatnonzero(u), **options) for s, t, u in rows]

    def loss(scores, teacher, *, key_where, where=None, **options):
        kept = kept_rows(np.zeros(len(scores)), where)
        shared = teacher[kept], np.asarray(key_where)[kept]
        return of_rows(scores, np.zeros(len(scores), int), *shared, where=where, **options)

    return loss


@over_candidates
def score_distillation_loss(
    scores, teacher, used, *, kind="kl", temperature=1.0, teacher_temperature=None
):
    if kind == "margin_mse":
        if len(used) < 2 or used[0] != 0:
            return None
        gaps = scores - teacher
        return np.mean([(gaps[0] - gaps[j]) ** 2 for j in used[1:]])
    if len(used) == 0:
        return None
    p, q = teacher[used] / (teacher_temperature or temperature), scores[used] / temperature
    p, q = p - log_sum_exp(p), q - log_sum_exp(q)
    return np.sum(np.exp(p) * (p - q))


@unlabelled
def relational_loss(
    features, *, teacher, kind="kl", temperature=1.0, teacher_temperature=None, similarity="cosine"
):
    s, t = (similarities(rows, rows, similarity) for rows in (features, teacher))
    both, results = (temperature, teacher_temperature or temperature), []
    for i in range(len(s)):
        student, target = np.delete(s[i], i), np.delete(t[i], i)
        if kind == "mse":
            results.append(np.mean((student - target) ** 2) if len(student) else None)
            continue
        logits = [row / T for row, T in zip((student, target), both, strict=True)]
        log_q, log_p = (row - log_sum_exp(row) for row in logits) if len(student) else logits
        results.append(np.sum(np.exp(log_p) * (log_p - log_q)) if len(student) else None)
    return results


# Two towers ----


def candidates(
    queries,
    keys,
    ids,
    line,
    *,
    similarity="cosine",
    key_ids=None,
    equal_ids="ignore",
    key_bias=None,
    own_keys=None,
    own_key_where=None,
    hardness=0.0,
    margin_of_false_negatives=None,
    guide=None,
    key_guide=None,
    own_key_guide=None,
    guide_margin=0.0,
    same_tower_negatives=False,
):
    """Of each query, and of the key of each: (similarity, logit, whether it is a positive)."""
    s, number = similarities(queries, keys, similarity), len(queries)
    bias = np.zeros(len(keys)) if key_bias is None else key_bias
    margin = np.inf if margin_of_false_negatives is None else margin_of_false_negatives
    ids = np.full(number, -1) if ids is None else ids
    if key_ids is None or equal_ids == "positive":
        further = np.full(len(keys) - number, -1) if key_ids is None else key_ids[number:]
        key_ids = np.concatenate([ids, further])
    if guide is None:
        guide, key_guide, guide_margin = np.ones((number, 1)), np.ones((len(keys), 1)), -np.inf
    of_guides = similarities(guide, key_guide, "cosine")

    def of(i, values, guides, is_same, bias, own=None, itself=None):
        """Of row i and other rows, of which one may be its `own` key, and one the row `itself`."""
        found = []
        for j, value in enumerate(values):
            if own is not None and (j == own or (is_same[j] and equal_ids == "positive")):
                found.append((value, line(value) + bias[j], True))
            elif (
                (j != itself and not is_same[j])
                and value <= s[i, i] + margin
                and guides[j] <= of_guides[i, i] - guide_margin
            ):
                found.append((value, line(value) + bias[j] + hardness * value, False))
        return found

    same, zeros, rows = (ids[:, None] == key_ids) & (ids[:, None] >= 0), 0 * bias, range(number)
    of_queries = [of(i, s[i], of_guides[i], same[i], bias, own=i) for i in rows]
    of_keys = [of(i, s[:, i], of_guides[:, i], same[:, i], zeros + bias[i], own=i) for i in rows]
    if own_keys is not None:
        used = np.ones(own_keys.shape[:2], bool) if own_key_where is None else own_key_where
        for i, (query, its_keys, its) in enumerate(zip(queries, own_keys, used, strict=True)):
            alone = similarities(query[None], its_keys[its], similarity)[0]
            guides, none = np.full(len(alone), -2.0), np.zeros(len(alone))
            if own_key_guide is not None:
                guides = similarities(guide[i, None], own_key_guide[i, its], "cosine")[0]
            of_queries[i] += of(i, alone, guides, none, none)
    towers = (queries, ids, guide, zeros, of_queries), (keys, key_ids, key_guide, bias, of_keys)
    for tower, its_ids, its_guide, its_bias, of_rows in towers if same_tower_negatives else ():
        values = similarities(tower, tower, similarity)
        guides = similarities(its_guide, its_guide, "cosine")
        same = (its_ids[:, None] == its_ids) & (its_ids[:, None] >= 0)
        for i, found in enumerate(of_rows):
            found += of(i, values[i], guides[i], same[i], its_bias, itself=i)
    return of_queries, of_keys


def over_pairs(values, over_rows=over_rows):
    """A loss of two towers, from the values of the pairs that are left, with further keys."""

    @over_rows
    def of_pairs(queries, rows, keys, ids, **options):
        return values(queries, keys, None if ids is None else ids[rows], **options)

    def loss(queries, keys, *, ids=None, where=None, key_where=None, **options):
        rows = np.arange(len(queries))
        used = np.ones(len(keys), bool) if key_where is None else np.array(key_where)
        used[rows] &= True if where is None else np.asarray(where)
        for name in ("key_bias", "key_ids", "key_guide"):
            if options.get(name) is not None:
                options[name] = options[name][used]
        return of_pairs(queries, rows, keys[used], ids, where=used[rows], **options)

    return loss


@over_pairs
def info_nce_loss(
    queries,
    keys,
    ids,
    *,
    temperature=0.07,
    symmetric=True,
    logsumexp_penalty=0.0,
    positive_in_denominator=True,
    **options,
):
    def of(found):
        log_sum = log_sum_exp(np.array([logit for _, logit, _ in found]))
        positives = [logit for _, logit, is_positive in found if is_positive]
        negatives = [logit for _, logit, is_positive in found if not is_positive]
        if not positive_in_denominator and not negatives:
            return np.nan
        denominator = log_sum if positive_in_denominator else log_sum_exp(np.array(negatives))
        return denominator - np.mean(positives) + logsumexp_penalty * log_sum**2

    both = candidates(queries, keys, ids, lambda s: s / temperature, **options)
    means = np.mean([[of(found) for found in side] for side in both[: 1 + symmetric]], axis=0)
    return [None if np.isnan(value) else value for value in np.reshape(means, -1)]


@over_pairs
def sigmoid_contrastive_loss(queries, keys, ids, *, scale=10.0, bias=-10.0, **options):
    of_queries, _ = candidates(queries, keys, ids, lambda s: scale * s + bias, **options)
    return [
        sum(np.logaddexp(0.0, -logit if is_positive else logit) for _, logit, is_positive in found)
        for found in of_queries
    ]


def contrastive_metrics(of_rows, hardness=0.0):
    """Accuracy, mean similarities and mean log-sum-exp, from `candidates` of each row."""
    every = [pair for found in of_rows for pair in found]
    hits, log_sums = [], []
    for found in of_rows:
        best = {
            sign: max((x - h * s for s, x, p in found if p == sign), default=-np.inf)
            for sign, h in ((1, 0.0), (0, hardness))
        }
        hits.append(best[1] > best[0] + 1e-12)  # Equal ones, which h * s may round, are misses.
        log_sums.append(log_sum_exp(np.array([logit for _, logit, _ in found])))
    means = [np.mean([s for s, _, is_positive in every if is_positive == sign]) for sign in (1, 0)]
    return np.mean(hits), *means, np.mean(log_sums)


# Subspaces ----


def classifier_projector(weights, epsilon=1e-4):
    """Eq. (vi), literally."""
    weights = np.asarray(weights, np.float64)
    gram = weights.T @ weights + epsilon * np.eye(weights.shape[1])
    return weights @ np.linalg.inv(gram) @ weights.T


def spectral_complement_projector(weights, power=0.3):
    """`1 - (lambda / max lambda)^p` in the full left basis, 1 for a null direction."""
    basis, singular, _ = np.linalg.svd(np.asarray(weights, np.float64))
    kept, largest = np.ones(len(basis)), singular.max()
    full = np.flatnonzero(singular > largest * max(weights.shape) * np.finfo(np.float64).eps)
    kept[full] = 1 - (singular[full] / largest) ** power
    return basis * kept @ basis.T


def projection(projector):
    """`features` times `projector(weights, **options)`."""
    return lambda features, weights, **options: (
        np.asarray(features, np.float64) @ projector(weights, **options)
    )


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
    basis, singular, right = np.linalg.svd(np.asarray(weights, np.float64))
    padded = np.zeros(len(basis))
    tolerance = singular[0] * max(np.shape(weights)) * np.finfo(dtype).eps
    padded[: len(singular)] = np.where(singular > tolerance, singular, 0)
    values = padded**2

    if epsilon is not None:
        weight = values / (values + epsilon)
        slope = epsilon / np.outer(values + epsilon, values + epsilon)
    else:
        weight = np.where(values > 0, (values / values[0]) ** (power / 2), 0)
        gaps = values[:, None] - values
        equal = np.abs(gaps) <= 1e-8 * np.maximum(values[:, None], values)
        derivatives = power / 2 * weight / np.where(values > 0, values, 1)
        quotients = (weight[:, None] - weight) / np.where(equal, 1, gaps)
        slope = np.where(equal, derivatives[:, None], quotients)
    inside = basis * weight @ basis.T
    turned = basis.T @ features.T @ cotangent @ basis
    turned = (turned + turned.T) / 2
    slope = slope * turned
    if power is not None:
        slope[0, 0] -= power / 2 / values[0] * np.sum(np.diagonal(turned) * weight)
    # W itself is not exactly orthogonal to its null directions, whose slope is 1 / epsilon.
    rank = len(singular)
    gradient = -2 * basis @ slope[:, :rank] * padded[:rank] @ right[:rank]
    return features - features @ inside, cotangent - cotangent @ inside, gradient


def spectral_overlap(weights, power):
    """The spectral norm on the left-hand side of eq. (viii)."""
    projector = spectral_complement_projector(weights, power)
    return np.linalg.norm(np.asarray(weights, np.float64).T @ projector, 2)


# Sums of a classification loss and a metric loss ----


def integrated(project, linear_logits=linear_logits, softmax_loss=softmax_loss, nca_loss=nca_loss):
    """The sum whose metric loss sees `project(features, weights, **options)`.

    `torch_references` has other functions of the same names.
    """

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
        projected = project(
            features, weights if basis_weights is None else basis_weights, **options
        )
        first = classification(linear_logits(features, weights, bias), labels, **common)
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


@over_rows
def group_softmax_loss(
    features, labels, weights, bias=None, *, num_groups, bound="loose", groups=None
):
    """Eq. (A.2), with explicit sums over the features of a group."""
    weights = np.asarray(weights, np.float64)
    known = [i for i, y in enumerate(labels) if y < weights.shape[1]]
    if groups is None:
        groups = np.zeros(features.shape, int)
        scores = discriminativity(features[known], labels[known], weights)
        groups[known] = ranked_groups(scores, num_groups)
    sharpness = {"loose": 1, "tight": num_groups}[bound]
    shift = 0.0 if bias is None else np.asarray(bias) / num_groups
    losses = np.full(len(labels), math.nan)
    losses[known] = 0.0
    for i, g in itertools.product(known, range(num_groups)):
        members = groups[i] == g
        logits = sharpness * (features[i, members] @ weights[members] + shift)
        losses[i] += (log_sum_exp(logits) - logits[labels[i]]) / sharpness
    return losses


# Prototypes on the sphere ----


def of_targets(value):
    """The loss of each row: `value` of x·q, ‖x‖ and ‖q‖, with the prototype q of its class."""

    @over_each_row
    def loss(x, y, prototypes, *, assignment=None, lengths=None):
        columns = range(prototypes.shape[1]) if assignment is None else assignment
        if y >= len(columns) or not 0 <= columns[y] < prototypes.shape[1]:
            return math.nan
        q = np.asarray(prototypes, np.float64)[:, columns[y]]
        q = q * (1.0 if lengths is None else lengths[y])
        return value(x @ q, np.linalg.norm(x), np.linalg.norm(q))

    return loss


@of_targets
def prototype_loss(xq, x, q):
    return (1 - (xq / (x * q) if x * q > 0 else 0.0)) ** 2


@of_targets
def dot_regression_loss(xq, x, q):
    return (xq - q * x) ** 2 / (2 * x) if x > 0 else 0.0


def class_means(old, features, labels, *, decay=0.9, where=None):
    new, rows = np.array(old, np.float64), kept_rows(labels, where)
    for c in {c for c in np.asarray(labels)[rows].tolist() if c < new.shape[1]}:
        mean = unit(np.sum([features[i] for i in rows if labels[i] == c], axis=0, dtype=np.float64))
        new[:, c] = unit(decay * new[:, c] + (1 - decay) * mean)
    return new


def class_balanced_lengths(labels, num_classes, *, where=None):
    known = np.asarray(labels)[kept_rows(labels, where)]
    sizes = np.bincount(known[known < num_classes], minlength=num_classes)
    balanced = sizes.sum() / max(np.count_nonzero(sizes), 1)
    return np.where(sizes > 0, np.sqrt(balanced / np.maximum(sizes, 1)), 1.0)


# Multi-label ----


def _two_sided(
    scores, targets, weights, *, positive_temperature=4.0, negative_temperature=1.0, margin=0.0
):
    """softplus of the hardest negative minus the hardest positive; None without a positive."""

    def side(sign, temperature, belongs):
        kept = belongs & (weights != 0)
        exponents = sign * scores[kept] / temperature + np.log(weights[kept])
        return temperature * log_sum_exp(exponents)

    positive = side(-1, positive_temperature, targets > 0)
    negative = side(1, negative_temperature, targets == 0)
    return None if np.isneginf(positive) else np.logaddexp(0.0, negative + positive + margin)


@over_each_row
def sample_wise_loss(logits, targets, **hyperparameters):
    return _two_sided(logits, targets, np.ones(len(logits)), **hyperparameters)


def over_classes(two_sided: Callable[..., Any], asarray: Any = np.asarray) -> Callable[..., Any]:
    """The loss of each class, from its logits, targets and the weights of the samples."""

    def loss(logits, targets, *, where=None, sample_weights=None, reduction="mean", **options):
        logits, targets = asarray(logits, dtype=float), asarray(targets)
        rows = kept_rows(targets, where)
        weights = asarray(np.ones(len(logits)) if sample_weights is None else sample_weights)[rows]
        columns = range(targets.shape[1])
        losses = {
            c: two_sided(logits[rows, c], targets[rows, c], weights, **options) for c in columns
        }
        defined = {c: loss for c, loss in losses.items() if loss is not None}
        return reduce_rows(defined, len(columns), None, reduction, asarray)

    return loss


class_wise_loss = over_classes(_two_sided)


def two_way(class_wise, sample_wise):
    def loss(logits, targets, *, reduction="mean", **options):
        assert reduction != "none"
        losses = (class_wise, sample_wise)
        return sum(of(logits, targets, reduction=reduction, **options) for of in losses)

    return loss


two_way_loss = two_way(class_wise_loss, sample_wise_loss)


@over_each_row
def multilabel_softmax_loss(x, t):
    positive = t > 0
    terms = log_sum_exp(x[t >= 0]) - x[positive]
    return np.average(terms, weights=t[positive]) if positive.any() else None


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


def over_proxies(
    values, cosine_logits=cosine_logits, asarray: Any = np.asarray
) -> Callable[..., Any]:
    """A loss of two values of each class, the first of the classes that have a sample.

    They are sums over the samples that are left, of which one of weight s counts s times.
    """

    def loss(
        features, labels, proxies, *, where=None, sample_weights=None, reduction="mean", **options
    ):
        weights = asarray(np.ones(len(labels)) if sample_weights is None else sample_weights)
        rows = [i for i in kept_rows(labels, where) if weights[i] > 0]  # Weight 0 removes a sample.
        own = np.asarray(labels)[rows, None] == np.arange(proxies.shape[1])
        cosines = cosine_logits(features[rows], proxies)
        pulls, pushes = values(cosines, own, weights[rows], **options)
        pulls = pulls[own.any(axis=0)]
        if reduction == "sum":
            return pulls.sum() + pushes.sum()
        return pulls.sum() / max(len(pulls), 1) + pushes.mean()

    return loss


@over_proxies
def proxy_anchor_loss(cosines, own, weights, *, margin=0.1, scale=32.0):
    pulls = np.log1p(weights @ (own * np.exp(-scale * (cosines - margin))))
    return pulls, np.log1p(weights @ (~own * np.exp(scale * (cosines + margin))))


@over_each_row
def proxy_nca_loss(x, y, proxies, *, temperature=1 / 9, include_own=True, normalize=True):
    scores = -distances(x, proxies.T, squared=True, normalize=normalize) / temperature
    if y >= len(scores):
        return math.nan
    return log_sum_exp(scores if include_own else np.delete(scores, y)) - scores[y]


# Two views ----


def of_views(values, asarray: Any = np.asarray):
    """A loss of two views, from the samples that are left, and their weights."""

    def loss(first, second, *, where=None, sample_weights=None, reduction="mean", **options):
        weights = asarray(np.ones(len(first)) if sample_weights is None else sample_weights)
        kept = weights > 0  # Weight 0 removes a sample.
        rows = np.flatnonzero(kept if where is None else kept & where)
        value = 0.0
        if len(rows):
            value = values(first[rows], second[rows], weights[rows], **options)
        return asarray(value * (sum(weights[rows]) if reduction == "sum" else 1.0))

    return loss


def covariances(*views, weights, ddof=0):
    """Of all dimensions. Deviations of equal numbers are exactly 0."""
    shifted = np.concatenate([view - view[0] for view in views], axis=1)
    return np.cov(shifted.T, aweights=weights, ddof=ddof)


@of_views
def vicreg_loss(
    first, second, weights, *, invariance=25.0, variance=25.0, covariance=1.0, epsilon=1e-4
):
    dim = first.shape[1]
    value = invariance * np.average(np.mean((first - second) ** 2, axis=1), weights=weights)
    if len(weights) < 2:
        return value
    for view in (first, second):
        matrix = covariances(view, weights=weights, ddof=1)
        spreads = np.sqrt(np.diag(matrix) + epsilon)
        value += variance * np.mean(np.maximum(0, 1 - spreads))
        value += covariance * np.sum((matrix - np.diag(np.diag(matrix))) ** 2) / dim
    return value


@of_views
def barlow_twins_loss(first, second, weights, *, off_diagonal=5e-3):
    dim = first.shape[1]
    matrix = covariances(first, second, weights=weights)
    spreads = np.sqrt(np.diag(matrix))
    scales = np.outer(spreads[:dim], spreads[dim:])
    gaps = matrix[:dim, dim:] / np.where(scales > 0, scales, 1) - np.eye(dim)
    return np.sum(gaps**2 * np.where(np.eye(dim), 1, off_diagonal))


# One view ----

NORMALS = np.random.default_rng(8).normal(size=(7, 6)).astype(np.float32)
"""The directions of SIGReg, before they are divided by their norms."""


@of_views
def sigreg_loss(features, _, weights, *, num_points=17, limit=3.0):
    total, step = 0.0, limit / (num_points - 1)
    for projections in (features @ unit(NORMALS.T).T).T:
        for k in range(num_points):
            target = np.exp(-((k * step) ** 2) / 2)
            gap = np.average(np.exp(1j * k * step * projections), weights=weights) - target
            total += (1 if k in (0, num_points - 1) else 2) * step * target * abs(gap) ** 2
    return len(features) * total / NORMALS.shape[1]


# Diagnostics ----


def discriminability(features, labels, *, where=None):
    """Half the mean squared distance of normalised pairs, (intra, inter), by a loop over pairs."""
    intra, inter = [], []
    for i, j in itertools.combinations(kept_rows(labels, where), 2):
        half = np.sum((unit(features[i]) - unit(features[j])) ** 2) / 2
        (intra if labels[i] == labels[j] else inter).append(half)
    return tuple(np.mean(halves) if halves else 0.0 for halves in (intra, inter))
