"""The losses in PyTorch, in double precision, for gradients by its autograd.

`references` removes the rows that take no part, and reduces the losses of the others.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.jaxloss import references

torch.set_num_threads(1)


def as_tensor(values, dtype=None):
    """Also of a list of scalars, some of which have a gradient."""
    if isinstance(values, list):
        return torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values])
    return torch.as_tensor(values, dtype=dtype)


over_rows = partial(references.over_rows, asarray=as_tensor)
over_each_row = partial(references.over_each_row, asarray=as_tensor)
over_pairs = partial(references.over_pairs, over_rows=over_rows)
of_views = partial(references.of_views, asarray=as_tensor)


def cross_entropies(
    logits,
    labels,
    *,
    margin=0.0,
    scale=1.0,
    label_smoothing=0.0,
    angular_margin=None,
    sample_margin=0.0,
    sample_angular_margin=None,
    targets=None,
    logsumexp_penalty=0.0,
):
    def of_class(value):
        value = torch.as_tensor(value, dtype=logits.dtype)
        return value[labels] if value.ndim else value

    is_target = F.one_hot(labels, logits.shape[1]).bool()
    target = logits[is_target]
    moved = target - of_class(margin) - sample_margin
    if angular_margin is not None or sample_angular_margin is not None:
        angle = of_class(0.0 if angular_margin is None else angular_margin)
        angle = angle + (0.0 if sample_angular_margin is None else sample_angular_margin)
        total = target.acos() + angle
        turned = torch.where(total > torch.pi, target + angle.cos() - 1, total.cos())
        moved = moved - target + torch.where(total < 0, torch.ones_like(total), turned)
    scaled = scale * logits.masked_scatter(is_target, moved)
    if targets is not None:
        uniform = targets.sum(1, keepdim=True) / logits.shape[1]
        labels, label_smoothing = torch.lerp(targets, uniform, label_smoothing), 0.0
    losses = F.cross_entropy(scaled, labels, reduction="none", label_smoothing=label_smoothing)
    return list(losses + logsumexp_penalty * scaled.logsumexp(1) ** 2)


softmax_loss = over_rows(cross_entropies)
margin_softmax_loss = over_rows(cross_entropies)


@over_rows
def sigmoid_loss(logits, labels):
    targets = F.one_hot(labels, logits.shape[1]) if labels.ndim == 1 else labels
    return list(
        F.binary_cross_entropy_with_logits(
            logits,
            targets.clamp(min=0).to(logits),
            weight=(targets >= 0).to(logits),
            reduction="none",
        ).sum(dim=1)
    )


def linear_logits(features, weights, bias=None):
    return F.linear(features, weights.T, bias)


def cosine_logits(features, weights):
    if weights.ndim == 3:
        return torch.stack([cosine_logits(features, w) for w in weights.unbind(2)]).amax(0)
    return F.cosine_similarity(features[:, :, None], weights[None], dim=1)


@over_rows
def classifier_loss(
    features, labels, weights, bias=None, *, similarity="inner", soft_cap=None, **options
):
    inner = similarity == "inner"
    logits = linear_logits(features, weights, bias) if inner else cosine_logits(features, weights)
    logits = logits if soft_cap is None else soft_cap * (logits / soft_cap).tanh()
    return cross_entropies(logits, labels, **options)


def over_anchors(of_anchor: Callable[..., Any]) -> Callable[..., Any]:
    return over_rows(references.of_each_anchor(of_anchor))


@over_anchors
def nca_loss(x, y, rows, row_labels, *, temperature=1.0):
    scores, same = -(x - rows).pow(2).sum(dim=1) / temperature, row_labels == y
    return scores.logsumexp(0) - scores[same].logsumexp(0) if same.any() else None


@over_anchors
def prototypical_loss(x, y, rows, row_labels, *, num_classes=None, temperature=1.0):
    del num_classes  # The classes of the batch are the candidates with and without it.
    present = row_labels.unique()
    target = torch.nonzero(present == y)[:, 0]
    if len(target) == 0:
        return None
    means = torch.stack([rows[row_labels == c].mean(dim=0) for c in present])
    return F.cross_entropy(-(x - means).pow(2).sum(dim=1) / temperature, target[0])


def _distances(x, rows, squared, normalize):
    if normalize:
        x, rows = F.normalize(x, dim=0), F.normalize(rows)
    squares = (x - rows).pow(2).sum(dim=1)
    if squared:
        return squares
    return torch.where(squares > 0, squares.clamp(min=1e-300).sqrt(), squares)


@over_anchors
def triplet_loss(
    x, y, rows, row_labels, *, margin=0.2, mining="hard", soft=False, squared=False, normalize=True
):
    hinge = F.softplus if soft else F.relu
    distances = _distances(x, rows, squared, normalize)
    same, rest = distances[row_labels == y], distances[row_labels != y]
    if not len(same) or not len(rest):
        return None
    if mining == "hard":
        terms = hinge(same.amax() - rest.amin() + margin)[None]
    elif mining == "semihard":
        farther = torch.where(rest[None] > same[:, None], rest[None], torch.inf).amin(dim=1)
        terms = hinge(same - torch.where(farther.isinf(), rest.amax(), farther) + margin)
    else:
        terms = hinge(same[:, None] - rest[None] + margin).flatten()
        terms = terms[terms > 0]
    return terms.sum(), len(terms)


def _similarities(a, b, similarity):
    """Of rows along the last axis."""
    if similarity == "cosine":
        a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    if similarity in ("cosine", "inner"):
        return (a * b).sum(-1)
    squares = ((a - b) ** 2).sum(-1)
    if similarity == "negative_squared_distance":
        return -squares
    zero = squares == 0
    return -squares.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def _pairs(x, y, rows, row_labels, *, similarity):
    """Similarities `[m]`, and the overlaps of the labels."""
    s = _similarities(x, rows, similarity)
    if row_labels.ndim == 1:
        return s, (row_labels == y).to(x)
    known = (y >= 0) & (row_labels >= 0)
    both, either = (y > 0) & (row_labels > 0) & known, ((y > 0) | (row_labels > 0)) & known
    return s, both.sum(dim=1).to(x) / either.sum(dim=1).clamp(min=1)


@over_anchors
def supervised_contrastive_loss(*anchor, temperature=0.1, denominator="all", similarity="cosine"):
    s, overlaps = _pairs(*anchor, similarity=similarity)
    logits, positive = s / temperature, overlaps > 0
    if not positive.any():
        return None
    if denominator == "all":
        total = logits.logsumexp(0)
    else:
        own = logits[positive][:, None]
        total = torch.cat([own, logits[~positive].expand(len(own), -1)], 1).logsumexp(1)
    weights = overlaps[positive]
    return (weights * (total - logits[positive])).sum() / weights.sum()


@over_anchors
def multi_similarity_loss(
    *anchor,
    positive_scale=2.0,
    negative_scale=50.0,
    threshold=0.5,
    mining_margin=None,
    similarity="cosine",
):
    s, overlaps = _pairs(*anchor, similarity=similarity)
    positives, negatives = s[overlaps > 0], s[overlaps == 0]
    if mining_margin is not None:
        if len(positives) == 0 or len(negatives) == 0:
            return s.sum() * 0
        hard = positives[positives < negatives.max() + mining_margin]
        negatives = negatives[negatives > positives.min() - mining_margin]
        positives = hard
    first = torch.exp(-positive_scale * (positives - threshold)).sum().log1p() / positive_scale
    return (
        first + torch.exp(negative_scale * (negatives - threshold)).sum().log1p() / negative_scale
    )


@over_anchors
def circle_loss(*anchor, margin=0.4, scale=80.0, similarity="cosine"):
    s, overlaps = _pairs(*anchor, similarity=similarity)
    positives, negatives = s[overlaps > 0], s[overlaps == 0]
    if len(positives) == 0 or len(negatives) == 0:
        return None
    of_positives = F.relu(1 + margin - positives.detach()) * (positives - (1 - margin))
    of_negatives = F.relu(negatives.detach() + margin) * (negatives - margin)
    pairs = scale * (of_negatives[:, None] - of_positives[None])
    # `F.softplus` is rounded above 20.
    return torch.logaddexp(s.new_zeros(()), pairs.flatten().logsumexp(0))


@partial(references.unlabelled, over_rows=over_rows)
def koleo_loss(features, neighbors=1):
    if len(features) < 2:
        return [None] * len(features)
    units = F.normalize(features)
    others = ~torch.eye(len(units), dtype=torch.bool)
    gaps = -_similarities(units[:, None], units, "negative_distance")
    gaps = gaps.masked_fill(~others, torch.inf)
    nearest = gaps.topk(min(neighbors, len(units) - 1), 1, largest=False).values
    return list(-torch.log(nearest + 1e-8).mean(1))


@partial(references.over_candidates, over_rows=over_rows)
def score_distillation_loss(
    scores, teacher, used, *, kind="kl", temperature=1.0, teacher_temperature=None
):
    if len(used) == 0 or (kind == "margin_mse" and (len(used) < 2 or used[0] != 0)):
        return None
    scores, teacher = scores[used], torch.as_tensor(teacher)[used]
    if kind == "margin_mse":
        return F.mse_loss(scores[0] - scores[1:], teacher[0] - teacher[1:])
    targets = (teacher / (teacher_temperature or temperature)).log_softmax(0)
    logits = (scores / temperature).log_softmax(0)
    return F.kl_div(logits, targets, reduction="sum", log_target=True)


@partial(references.unlabelled, over_rows=over_rows)
def relational_loss(
    features, *, teacher, kind="kl", temperature=1.0, teacher_temperature=None, similarity="cosine"
):
    number = len(features)
    if number < 2:
        return [None] * number
    others = ~torch.eye(number, dtype=torch.bool)
    s, t = (
        _similarities(rows[:, None], rows, similarity)[others].reshape(number, -1)
        for rows in (features, teacher.to(features.dtype))
    )
    if kind == "mse":
        return list(((s - t) ** 2).mean(1))
    log_p = (t / (teacher_temperature or temperature)).log_softmax(1)
    log_q = (s / temperature).log_softmax(1)
    return list(F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(1))


def _candidates(
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
    guide: Any = None,
    key_guide: Any = None,
    own_key_guide=None,
    guide_margin=0.0,
    same_tower_negatives=False,
):
    """Of each query, and of the key of each: the logits of all pairs, positives, negatives."""
    number = len(queries)
    own = torch.eye(number, len(keys), dtype=torch.bool)
    ids = torch.full((number,), -1) if ids is None else ids
    if key_ids is None:
        key_ids = torch.cat([ids, torch.full((len(keys) - number,), -1)])

    def equal(a, b):
        return (a[:, None] == b) & (a[:, None] >= 0)

    same = own | equal(ids, key_ids)
    positives = (
        own if equal_ids == "ignore" else own | equal(ids, torch.cat([ids, key_ids[number:]]))
    )
    s = _similarities(queries[:, None], keys, similarity)
    bias = s.new_zeros(len(keys)) if key_bias is None else key_bias
    limits = s.diagonal().detach() + (margin_of_false_negatives or 0)
    guides: Any = (
        None if guide is None else _similarities(guide[:, None], key_guide, "cosine").detach()
    )

    def of(s, positives, negatives, guides_of_pairs, bias):
        """Of the pairs of a row, along the second axis."""
        if margin_of_false_negatives is not None:
            negatives = negatives & (s <= limits[:, None])
        if guides_of_pairs is not None:
            negatives = negatives & (guides_of_pairs <= guides.diagonal()[:, None] - guide_margin)
        harder = (hardness * s.detach()).masked_fill(positives, 0)
        return line(s) + bias + harder, positives, negatives

    columns = (x if x is None else x[:, :number].T for x in (s, positives, ~same, guides))
    of_keys = of(*columns, bias=bias[:number, None])
    of_queries = of(s, positives, ~same, guides, bias)

    def with_more(found, more):
        return [torch.cat(both, 1) for both in zip(found, more, strict=True)]

    if own_keys is not None:
        used = torch.ones(own_keys.shape[:2]).bool() if own_key_where is None else own_key_where
        # Those that are not used have no gradient, whatever they are.
        alone = _similarities(queries[:, None], own_keys.where(used[..., None], 0), similarity)
        of_pairs = None
        if own_key_guide is not None:
            of_pairs = _similarities(guide[:, None], own_key_guide, "cosine")  # pyright: ignore
        alone = of(alone, torch.zeros_like(used), used, of_pairs, 0.0)
        of_queries = with_more(of_queries, alone)
    if same_tower_negatives:
        sides = []
        for found, tower, its_ids, its_guide, its_bias in (
            (of_queries, queries, ids, guide, 0.0),
            (of_keys, keys, key_ids, key_guide, bias),
        ):
            others = ~(
                torch.eye(number, len(tower), dtype=torch.bool) | equal(its_ids, its_ids)[:number]
            )
            s = _similarities(tower[:number, None], tower, similarity)
            of_pairs = None
            if guide is not None:
                of_pairs = _similarities(its_guide[:number, None], its_guide, "cosine")  # pyright: ignore
            more = of(s, torch.zeros_like(others), others, of_pairs, its_bias)
            sides.append(with_more(found, more))
        of_queries, of_keys = sides
    return of_queries, of_keys


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
    def of(logits, positives, negatives):
        log_sums = logits.masked_fill(~(positives | negatives), -torch.inf).logsumexp(1)
        denominators = log_sums
        if not positive_in_denominator:  # Without a negative, the row does not count.
            some = negatives.any(1, keepdim=True)
            denominators = logits.masked_fill(~negatives & some, -torch.inf).logsumexp(1)
        means = logits.masked_fill(~positives, 0).sum(1) / positives.sum(1)
        return denominators - means + logsumexp_penalty * log_sums**2

    both = _candidates(queries, keys, ids, lambda s: s / temperature, **options)[: 1 + symmetric]
    values = torch.stack([of(*side) for side in both]).mean(0)
    counts = torch.stack([side[2].any(1) | positive_in_denominator for side in both]).all(0)
    return [value if used else None for value, used in zip(values, counts, strict=True)]


@over_pairs
def sigmoid_contrastive_loss(queries, keys, ids, *, scale=10.0, bias=-10.0, **options):
    both = _candidates(queries, keys, ids, lambda s: scale * s + bias, **options)
    logits, positives, negatives = both[0]
    terms = -F.logsigmoid(logits.where(positives, -logits))
    return terms.masked_fill(~(positives | negatives), 0).sum(dim=1)


def classifier_projector(weights, epsilon=1e-4):
    gram = weights.T @ weights + epsilon * torch.eye(weights.shape[1], dtype=weights.dtype)
    return weights @ torch.linalg.solve(gram, weights.T)


def spectral_complement_projector(weights, power=0.3):
    """Differentiable where the singular values differ and W has full rank."""
    weights = torch.as_tensor(weights)
    basis, singular, _ = torch.linalg.svd(weights, full_matrices=False)
    soft = basis @ torch.diag((singular / singular.max()) ** power) @ basis.T
    return torch.eye(len(weights), dtype=weights.dtype) - soft


def project_classifier(features, weights, *, epsilon=1e-4):
    return features @ classifier_projector(weights, epsilon)


def project_complement(features, weights, *, stop_gradient=False, **options):
    weights = weights.detach() if stop_gradient else weights
    return features - project_classifier(features, weights, **options)


def project_spectral_complement(features, weights, *, power=0.3, stop_gradient=False):
    projector = spectral_complement_projector(weights, power)
    return features @ (projector.detach() if stop_gradient else projector)


integrated = partial(
    references.integrated, linear_logits=linear_logits, softmax_loss=softmax_loss, nca_loss=nca_loss
)
sum_loss = integrated(lambda features, weights: features)
direct_sum_loss = integrated(project_complement)
spectral_sum_loss = integrated(project_spectral_complement)


def group_softmax_loss(
    features, labels, weights, bias=None, *, num_groups, bound="loose", groups=None, **common
):
    """From the tensor of all ingredient logits, [n, d, C]."""
    ingredients = features[:, :, None] * weights[None]
    if groups is None:
        arrays = (features.detach().numpy(), labels.clamp(min=0), weights.detach().numpy())
        scores = references.discriminativity(*arrays)
        groups = torch.tensor(references.ranked_groups(scores, num_groups))
    sharpness = {"loose": 1, "tight": num_groups}[bound]
    total = torch.zeros(()).to(features)
    for g in range(num_groups):
        logits = torch.where(groups[:, :, None] == g, ingredients, 0).sum(dim=1)
        logits = logits if bias is None else logits + bias / num_groups
        total = total + softmax_loss(logits * sharpness, labels, **common) / sharpness
    return total


def _targets(labels, prototypes, assignment):
    return prototypes.T[labels if assignment is None else torch.tensor(assignment)[labels]]


@over_rows
def prototype_loss(features, labels, prototypes, *, assignment=None):
    targets = _targets(labels, prototypes, assignment)
    return list((1 - F.cosine_similarity(features, targets, dim=1)) ** 2)


@over_rows
def dot_regression_loss(features, labels, prototypes, *, assignment=None, lengths=None):
    targets = _targets(labels, prototypes, assignment)
    if lengths is not None:
        targets = targets * torch.tensor(lengths)[labels][:, None]
    norms = torch.linalg.vector_norm(features, dim=1).detach()
    full = torch.linalg.vector_norm(targets, dim=1) * norms
    return list(((features * targets).sum(dim=1) - full) ** 2 / norms / 2)


def _two_sided(x, t, weights, *, positive_temperature=4.0, negative_temperature=1.0, margin=0.0):
    if not (t > 0).any():
        return None
    if not (t == 0).any():
        return 0 * x.sum()
    positive = (-x / positive_temperature + weights.log())[t > 0].logsumexp(0)
    negative = (x / negative_temperature + weights.log())[t == 0].logsumexp(0)
    gap = negative_temperature * negative + positive_temperature * positive + margin
    return F.softplus(gap, threshold=500)


@over_each_row
def sample_wise_loss(x, t, **hyperparameters):
    return _two_sided(x, t, torch.ones_like(x), **hyperparameters)


class_wise_loss = references.over_classes(_two_sided, as_tensor)
two_way_loss = references.two_way(class_wise_loss, sample_wise_loss)


@over_each_row
def multilabel_softmax_loss(x, t):
    proportions = t.clamp(min=0).to(x) / t.clamp(min=0).sum()
    return F.cross_entropy(x[t >= 0], proportions[t >= 0]) if (t > 0).any() else None


@over_rows
def asymmetric_loss(
    logits,
    targets,
    *,
    positive_focus=0.0,
    negative_focus=4.0,
    clip=0.05,
    stop_focus_gradient=False,
):
    """As in the authors' code, the clip is applied to the probability of not being negative."""
    p = logits.sigmoid()
    not_p = (1 - p + clip).clamp(max=1)
    weights = ((1 - p) ** positive_focus, (1 - not_p) ** negative_focus)
    if stop_focus_gradient:
        weights = tuple(weight.detach() for weight in weights)
    positives, negatives = weights[0] * p.log(), weights[1] * not_p.log()
    return list(-(positives * (targets > 0) + negatives * (targets == 0)).sum(dim=1))


def _harmonic(ranks):
    sums = [sum(1 / j for j in range(1, r + 1)) for r in ranks.tolist()]
    return torch.tensor(sums, dtype=torch.float64)


@over_each_row
def warp_loss(x, t):
    hinges = (1 - x[t > 0][:, None] + x[t == 0][None]).clamp(min=0)
    ranks = (hinges > 0).sum(dim=1)
    return (hinges.sum(dim=1) * _harmonic(ranks) / ranks.clamp(min=1)).sum()


@over_each_row
def robust_multilabel_loss(x, t, *, ramp=-0.8, leak=0.1, binary_weight=5.0):
    """As in the authors' code, a ramp is a hinge minus a part of a later hinge."""

    def ramps(z):
        return (1 - z).clamp(min=0) - (1 - leak) * (ramp - z).clamp(min=0)

    gaps = x[t > 0][:, None] - x[t == 0][None]
    binary = ramps(x[t > 0]).sum() + ramps(-x[t == 0]).sum()
    pairs = ramps(gaps).sum(dim=1) * _harmonic((gaps < 1).sum(dim=1))
    return pairs.sum() + binary_weight * binary


@partial(references.over_proxies, cosine_logits=cosine_logits, asarray=as_tensor)
def proxy_anchor_loss(cosines, own, weights, *, margin=0.1, scale=32.0):
    own, zero = torch.tensor(own), cosines.new_zeros(1, own.shape[1])

    def log1p_sum(exponents, members):
        kept = (exponents + weights.log()[:, None]).masked_fill(~members, -torch.inf)
        return torch.cat([zero, kept]).logsumexp(0)

    return log1p_sum(-scale * (cosines - margin), own), log1p_sum(scale * (cosines + margin), ~own)


@over_rows
def proxy_nca_loss(
    features, labels, proxies, *, temperature=1 / 9, include_own=True, normalize=True
):
    own = F.one_hot(labels, proxies.shape[1]).bool()
    rows, columns = (F.normalize(x) if normalize else x for x in (features, proxies.T))
    scores = -torch.cdist(rows, columns).pow(2) / temperature
    others = scores if include_own else scores.masked_fill(own, -torch.inf)
    return list(others.logsumexp(1) - scores[own])


@of_views
def vicreg_loss(
    first, second, weights, *, invariance=25.0, variance=25.0, covariance=1.0, epsilon=1e-4
):
    dim, shares = first.shape[1], weights / weights.sum()
    value = invariance * (shares @ (first - second).pow(2)).mean()
    for view in (first, second):
        centred = view - shares @ view
        matrix = (centred.T * shares) @ centred / (1 - shares.pow(2).sum())
        value = value + variance * F.relu(1 - (matrix.diag() + epsilon).sqrt()).mean()
        value = value + covariance * (matrix - matrix.diag().diag()).pow(2).sum() / dim
    return value


@of_views
def barlow_twins_loss(first, second, weights, *, off_diagonal=5e-3):
    shares = weights / weights.sum()

    def standardized(view):
        centred = view - shares @ view
        return centred / (shares @ centred.pow(2)).sqrt()

    matrix = (standardized(first).T * shares) @ standardized(second)
    own = torch.eye(len(matrix)).to(matrix)
    return ((matrix - own).pow(2) * (own + off_diagonal * (1 - own))).sum()


@of_views
def sigreg_loss(features, _, weights, *, num_points=17, limit=3.0):
    """As in the code of LeJEPA, whose mean has no weights."""
    t = torch.linspace(0, limit, num_points, dtype=torch.float64)
    phi = torch.exp(-t.square() / 2)
    quadrature = torch.full_like(t, 2 * limit / (num_points - 1))
    quadrature[[0, -1]] = limit / (num_points - 1)
    directions = torch.as_tensor(references.NORMALS, dtype=torch.float64)
    x_t = (features @ (directions / directions.norm(p=2, dim=0))).unsqueeze(-1) * t
    mean = partial(torch.einsum, "n,njk->jk", weights / weights.sum())
    err = (mean(x_t.cos()) - phi).square() + mean(x_t.sin()).square()
    return ((err @ (quadrature * phi)) * len(features)).mean()


def evaluate(loss, args, differentiable, *, reductions, where, sample_weights, cotangent):
    """Values and gradients in the format of `harness.evaluate`."""
    tensors = [
        torch.tensor(np.asarray(a, np.float64 if k in differentiable else np.int64))
        for k, a in enumerate(args)
    ]
    leaves = [tensors[k].requires_grad_() for k in differentiable]
    weights = torch.tensor(np.asarray(sample_weights, np.float64), requires_grad=True)
    leaves.append(weights)
    results = {}
    for reduction in reductions:
        value = loss(
            *tensors, where=torch.tensor(where), sample_weights=weights, reduction=reduction
        )
        scalar = (
            value if reduction != "none" else value @ torch.tensor(cotangent, dtype=value.dtype)
        )
        results[reduction] = value.detach().numpy()
        if scalar.requires_grad:
            grads = torch.autograd.grad(scalar, leaves, allow_unused=True, materialize_grads=True)
        else:
            grads = [torch.zeros_like(leaf) for leaf in leaves]
        results[f"{reduction}_grad"] = tuple(g.numpy() for g in grads)
    return results
