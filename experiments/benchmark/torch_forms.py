"""The same losses as PyTorch's users write them: vectorised, from its own functions.

Weights have the layout [d, C] of JAX's forms; `weights.T` is a view.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.benchmark.cases import ANGLE, BASE_CLASSES, FACE_SCALE, GROUPS, MARGIN, SCALE


def sigmoid(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of classes or multi-hot targets, summed over those of a sample."""
    if targets.ndim == 1:
        targets = F.one_hot(targets, logits.shape[1])
    targets = targets.to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(logits)


def margin_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with a margin on the target's logit, as the paper's authors write it."""
    return F.cross_entropy(SCALE * (logits - MARGIN * F.one_hot(labels, logits.shape[1])), labels)


def cosine_margin_softmax(features: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return margin_softmax(F.normalize(features) @ F.normalize(weights, dim=0), labels)


def nca(features: Tensor, labels: Tensor) -> Tensor:
    """NCA by one softmax, as pytorch-metric-learning writes it, on distances by one `addmm`.

    `‖x_i‖²` is left out: it cancels in the softmax of row i. Of the forms that were tried this is
    the fastest; two masked log-sum-exps, exact where the probability is near 0, take 1.5 to 2 times
    as long.
    """
    squares = features.square().sum(1)
    scores = torch.addmm(-squares[None, :], features, features.T, alpha=2) / features.shape[1]
    scores.fill_diagonal_(-torch.inf)
    same_class = labels[:, None] == labels[None, :]
    probability = (scores.softmax(1) * same_class).sum(1)
    has_positive = same_class.sum(1) > 1
    values = torch.where(has_positive, -probability.clamp(min=1e-30).log(), 0)
    return values.sum() / has_positive.sum()


def prototypical(features: Tensor, labels: Tensor, *, num_classes: int | None = None) -> Tensor:
    """Distances to the class means; the anchor's own mean leaves the anchor out.

    Without `num_classes`, for classes of any number: `unique` gives their indices.
    """
    if num_classes is None:
        classes, labels = labels.unique(return_inverse=True)
        num_classes = len(classes)
    membership = F.one_hot(labels, num_classes).to(features.dtype)
    sizes = membership.sum(0)
    means = (membership.T @ features) / sizes.clamp(min=1)[:, None]
    squares = features.square().sum(1)[:, None] + means.square().sum(1)[None, :]
    logits = -(squares - 2 * features @ means.T) / features.shape[1]
    own_size = sizes[labels]
    factor = own_size / (own_size - 1).clamp(min=1)
    own = logits.gather(1, labels[:, None])[:, 0] * factor.square()
    logits = logits.masked_fill((sizes == 0)[None, :], -torch.inf)
    logits = logits.scatter(1, labels[:, None], own[:, None])
    values = F.cross_entropy(logits, labels, reduction="none")
    defined = own_size > 1
    return torch.where(defined, values, 0).sum() / defined.sum()


def sum_of_losses(
    features: Tensor, labels: Tensor, weights: Tensor, bias: Tensor, within: Tensor | None = None
) -> Tensor:
    """Softmax and NCA, the latter without the part `within` of the features."""
    metric_features = features if within is None else features - within
    return classifier(features, labels, weights, bias) + nca(metric_features, labels)


def direct_sum(
    features: Tensor, labels: Tensor, weights: Tensor, bias: Tensor, *, stopped: bool = False
) -> Tensor:
    """Softmax, and NCA in the complement of the classifier's subspace, which may be a constant."""
    span = weights.detach() if stopped else weights
    gram = span.T @ span + 1e-4 * torch.eye(span.shape[1]).to(span)
    coordinates = torch.cholesky_solve((features @ span).T, torch.linalg.cholesky(gram))
    return sum_of_losses(features, labels, weights, bias, (span @ coordinates).T)


def spectral_sum(
    features: Tensor,
    labels: Tensor,
    weights: Tensor,
    bias: Tensor,
    *basis: Tensor,
    stopped: bool = False,
) -> Tensor:
    """Softmax, and NCA in the soft complement; `basis` are singular vectors and values."""
    if not basis:
        span = weights.detach() if stopped else weights
        basis = torch.linalg.svd(span, full_matrices=False)[:2]
    vectors, values = basis
    within = ((features @ vectors) * (values / values[0]) ** 0.3) @ vectors.T
    return sum_of_losses(features, labels, weights, bias, within)


def nca_references(
    features: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor
) -> Tensor:
    squares = features.square().sum(1)[:, None] + references.square().sum(1)[None, :]
    scores = -(squares - 2 * features @ references.T).clamp(min=0) / features.shape[1]
    same = labels[:, None] == reference_labels[None, :]
    own = scores.masked_fill(~same, -torch.inf).logsumexp(1)
    return (scores.logsumexp(1) - own).mean()


def classifier(features: Tensor, labels: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(features, weights.T, bias), labels)


def group_softmax(features: Tensor, labels: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """The loose bound: groups by sorting the features, G masked products."""
    with torch.no_grad():
        own = weights.T[labels]
        others = (weights.sum(1) - own) / (weights.shape[1] - 1)
        order = (features * (own - others)).argsort(dim=1, stable=True)
        rank_groups = torch.arange(features.shape[1], device=features.device)
        rank_groups = rank_groups * GROUPS // features.shape[1]
        groups = torch.empty_like(order).scatter_(1, order, rank_groups.expand_as(order))
    numbers = torch.arange(GROUPS, device=features.device)
    is_member = groups[:, None, :] == numbers[None, :, None]
    logits = (features[:, None, :] * is_member) @ weights + bias / GROUPS
    targets = labels.repeat_interleave(GROUPS)
    return GROUPS * F.cross_entropy(logits.reshape(-1, logits.shape[2]), targets)


def prototype(features: Tensor, labels: Tensor, prototypes: Tensor, assignment: Tensor) -> Tensor:
    targets = prototypes.T[assignment[labels]]
    return (1 - F.cosine_similarity(features, targets)).square().mean()


def dot_regression(
    features: Tensor, labels: Tensor, prototypes: Tensor, assignment: Tensor
) -> Tensor:
    """As its authors write it, with the norms of features detached."""
    targets = prototypes.T[assignment[labels]]
    norms = features.detach().norm(dim=1)
    dots = (features * targets).sum(1)
    return (0.5 * (dots - targets.norm(dim=1) * norms).square() / norms).mean()


def two_way(logits: Tensor, targets: Tensor, *, dims: tuple[int, ...] = (0, 1)) -> Tensor:
    """The gaps of every class over the samples (0), and of every sample over the classes (1)."""
    positive, values = targets > 0, []
    # As the authors write it: masked log-sum-exps, and a mean over what has a positive. A finite
    # number instead of the infinity would make the exponential three times as slow.
    for dim in dims:
        negatives = logits.masked_fill(positive, -torch.inf).logsumexp(dim)
        positives = 4 * (-logits / 4).masked_fill(~positive, -torch.inf).logsumexp(dim)
        has_positive = positive.any(dim)
        gaps = F.softplus(negatives + positives)
        values.append(torch.where(has_positive, gaps, 0).sum() / has_positive.sum())
    return sum(values[1:], values[0])


def asymmetric(logits: Tensor, targets: Tensor) -> Tensor:
    """As its authors' code: probabilities, a shift of the negatives', and focusing."""
    p = logits.sigmoid()
    not_q = (1 - p + 0.05).clamp(max=1)
    negatives = -((1 - not_q) ** 4) * not_q.clamp(min=1e-8).log()
    values = torch.where(targets > 0, -F.logsigmoid(logits), negatives)
    return values.sum() / len(logits)


def _rank_weights(logits: Tensor, ranks: Tensor) -> Tensor:
    numbers = torch.arange(1, logits.shape[1] + 1, device=logits.device, dtype=logits.dtype)
    return F.pad(numbers.reciprocal().cumsum(0), (1, 0))[ranks]


def warp(logits: Tensor, targets: Tensor) -> Tensor:
    """All pairs of a positive and a negative; the rank is a constant."""
    positive = targets > 0
    margins = 1 - logits[:, :, None] + logits[:, None, :]
    violated = positive[:, :, None] & ~positive[:, None, :] & (margins > 0)
    ranks = violated.sum(2)
    weights = _rank_weights(logits, ranks) / ranks.clamp(min=1)
    return (weights * (violated * margins).sum(2)).sum() / len(logits)


def robust_multilabel(logits: Tensor, targets: Tensor) -> Tensor:
    """As its authors' code, with all pairs at once and the rank itself; it is a constant."""

    def ramps(margins: Tensor) -> Tensor:
        return (1 - margins).clamp(min=0) - 0.9 * (-0.8 - margins).clamp(min=0)

    positive = targets > 0
    gaps = logits[:, :, None] - logits[:, None, :]
    pairs = positive[:, :, None] & ~positive[:, None, :]
    weights = _rank_weights(logits, (pairs & (gaps < 1)).sum(2))
    ranking = (weights * (pairs * ramps(gaps)).sum(2)).sum()
    return (ranking + 5 * ramps(torch.where(positive, logits, -logits)).sum()) / len(logits)


def _pairs(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cosines of all pairs, and which of them are positives and negatives."""
    features, same = F.normalize(features), labels[:, None] == labels[None, :]
    return features @ features.T, same.clone().fill_diagonal_(False), ~same


def supervised_contrastive(features: Tensor, labels: Tensor) -> Tensor:
    """One log-softmax, of which the positives are averaged."""
    cosines, positive, _ = _pairs(features, labels)
    logits = (cosines / 0.1).fill_diagonal_(-torch.inf)
    values = logits.log_softmax(1).masked_fill(~positive, 0).sum(1)
    return -(values / positive.sum(1)).mean()


def nt_xent(features: Tensor, labels: Tensor) -> Tensor:
    """Each positive pair against the negatives of its anchor."""
    cosines, positive, negative = _pairs(features, labels)
    logits = cosines / 0.1
    negatives = logits.masked_fill(~negative, -torch.inf).logsumexp(1, keepdim=True)
    return (F.softplus(negatives - logits) * positive).sum() / positive.sum()


def info_nce(queries: Tensor, keys: Tensor, own_keys: Tensor | None = None) -> Tensor:
    """As in CLIP: rows and columns of one matrix; `own_keys` are further columns of each row."""
    queries, numbers = F.normalize(queries), torch.arange(len(queries), device=queries.device)
    logits = rows = queries @ F.normalize(keys).T / 0.07
    if own_keys is not None:
        mined = (queries[:, None] * F.normalize(own_keys, dim=2)).sum(2) / 0.07
        rows = torch.cat([logits, mined], 1)
    return (F.cross_entropy(rows, numbers) + F.cross_entropy(logits.T, numbers)) / 2


def info_nce_metrics(queries: Tensor, keys: Tensor) -> Tensor:
    """Accuracy, mean similarities and log-sum-exp from the same matrix."""
    cosines = F.normalize(queries) @ F.normalize(keys).T
    logits, numbers = cosines / 0.07, torch.arange(len(queries), device=queries.device)
    loss = (F.cross_entropy(logits, numbers) + F.cross_entropy(logits.T, numbers)) / 2
    with torch.no_grad():
        accuracy = (logits.argmax(1) == numbers).to(logits).mean()
        own, number = cosines.diagonal().sum(), len(queries)
        others = (cosines.sum() - own) / (number * (number - 1))
        metrics = accuracy + own / number + others + logits.logsumexp(1).mean()
    return loss + 0 * metrics


def sigmoid_contrastive(queries: Tensor, keys: Tensor) -> Tensor:
    """As in SigLIP, with `softplus(-z) = softplus(z) - z` for the positives."""
    logits = 10 * F.normalize(queries) @ F.normalize(keys).T - 10
    return (F.softplus(logits).sum() - logits.diagonal().sum()) / len(queries)


def multi_similarity(features: Tensor, labels: Tensor) -> Tensor:
    cosines, positive, negative = _pairs(features, labels)
    pull = (-2 * (cosines - 0.5)).masked_fill(~positive, -torch.inf).logsumexp(1)
    push = (50 * (cosines - 0.5)).masked_fill(~negative, -torch.inf).logsumexp(1)
    return (F.softplus(pull) / 2 + F.softplus(push) / 50).mean()


def circle(features: Tensor, labels: Tensor) -> Tensor:
    cosines, positive, negative = _pairs(features, labels)
    fixed = cosines.detach()
    pull = -80 * (1.4 - fixed).relu() * (cosines - 0.6)
    push = 80 * (fixed + 0.4).relu() * (cosines - 0.4)
    pull = pull.masked_fill(~positive, -torch.inf).logsumexp(1)
    return F.softplus(pull + push.masked_fill(~negative, -torch.inf).logsumexp(1)).mean()


def _distances(cosines: Tensor) -> Tensor:
    return (2 - 2 * cosines).clamp(min=1e-12).sqrt()


def triplet_hard(features: Tensor, labels: Tensor) -> Tensor:
    """Extreme cosines first: n roots in place of n²."""
    cosines, positive, negative = _pairs(features, labels)
    farthest = cosines.masked_fill(~positive, torch.inf).min(1).values
    nearest = cosines.masked_fill(~negative, -torch.inf).max(1).values
    return (_distances(farthest) - _distances(nearest) + 0.2).relu().mean()


def _sorted_pairs(features: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Distances of the positives `[n, k]` and which exist, and sorted ones of the negatives."""
    cosines, positive, negative = _pairs(features, labels)
    most = int(positive.sum(1).max())
    positives, where = positive.float().topk(most)
    negatives = cosines.masked_fill(~negative, -2).sort(1, descending=True).values
    return _distances(cosines.gather(1, where)), positives > 0, _distances(negatives), negative


def triplet_semihard(features: Tensor, labels: Tensor) -> Tensor:
    """A binary search for every positive among the sorted negatives."""
    positives, exists, negatives, negative = _sorted_pairs(features, labels)
    nearest = torch.searchsorted(negatives.detach(), positives.detach(), right=True)
    nearest = torch.minimum(nearest, negative.sum(1, keepdim=True) - 1)
    values = (positives - negatives.gather(1, nearest) + 0.2).relu()
    return (values * exists).sum() / exists.sum()


def triplet_all(features: Tensor, labels: Tensor) -> Tensor:
    """The same, with the sums of the sorted negatives: no array has n³ elements."""
    positives, exists, negatives, negative = _sorted_pairs(features, labels)
    limits = positives + 0.2
    number = torch.searchsorted(negatives.detach(), limits.detach())
    number = torch.minimum(number, negative.sum(1, keepdim=True)) * exists
    sums = F.pad(negatives.cumsum(1), (1, 0)).gather(1, number)
    return ((number * limits - sums) * exists).sum() / number.sum()


def proxy_anchor(features: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
    cosines = F.normalize(features) @ F.normalize(proxies, dim=0)
    own = F.one_hot(labels, proxies.shape[1]).bool()
    pull = (-32 * (cosines - 0.1)).masked_fill(~own, -torch.inf).logsumexp(0)
    push = (32 * (cosines + 0.1)).masked_fill(own, -torch.inf).logsumexp(0)
    present = own.any(0)
    pull = torch.where(present, F.softplus(pull), 0).sum() / present.sum()
    return pull + F.softplus(push).mean()


def arcface(features: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The angle is added by cosines and sines of sums, without `acos`."""
    cosines = F.normalize(features) @ F.normalize(weights, dim=0)
    angle = torch.tensor(ANGLE)
    own = cosines.gather(1, labels[:, None])
    raised = own * angle.cos() - (1 - own**2).clamp(min=1e-6).sqrt() * angle.sin()
    raised = torch.where(own >= -angle.cos(), raised, own + angle.cos() - 1)
    raised = raised.to(cosines.dtype)  # Autocast takes powers in float32.
    return F.cross_entropy(FACE_SCALE * cosines.scatter(1, labels[:, None], raised), labels)


def vicreg(first: Tensor, second: Tensor) -> Tensor:
    """As its authors' code, whose two variance terms are halved."""
    value = 25 * F.mse_loss(first, second)
    for view in (first, second):
        view = view - view.mean(0)
        covariances = view.T @ view / (len(view) - 1)
        variances = covariances.diagonal()
        value = value + 25 * (1 - (variances + 1e-4).sqrt()).relu().mean()
        value = value + (covariances.square().sum() - variances.square().sum()) / view.shape[1]
    return value


def barlow_twins(first: Tensor, second: Tensor) -> Tensor:
    """Normalised by hand: `batch_norm` adds a number to the variances."""
    views = [view - view.mean(0) for view in (first, second)]
    first, second = (view / view.norm(dim=0) for view in views)
    correlations = first.T @ second
    own = correlations.diagonal()
    return (1 - own).square().sum() + 5e-3 * (correlations.square().sum() - own.square().sum())


_FORMS = (
    *(sigmoid, margin_softmax, two_way, asymmetric, warp, robust_multilabel),
    *(cosine_margin_softmax, classifier, group_softmax, proxy_anchor, arcface),
    *(direct_sum, spectral_sum, prototype, dot_regression),
    *(nca, nca_references, supervised_contrastive, nt_xent, multi_similarity, circle),
    *(triplet_hard, triplet_semihard, triplet_all),
    *(info_nce, info_nce_metrics, sigmoid_contrastive, vicreg, barlow_twins),
)
FORMS: dict[str, Callable[..., Any]] = {form.__name__: form for form in _FORMS} | {
    "softmax": F.cross_entropy,
    "sum": sum_of_losses,
    "prototypical": partial(prototypical, num_classes=BASE_CLASSES),
    "prototypical_by_samples": prototypical,
    "direct_sum_stopped": partial(direct_sum, stopped=True),
    "spectral_sum_stopped": partial(spectral_sum, stopped=True),
    "spectral_sum_with_basis": spectral_sum,
    "info_nce_own_keys": info_nce,
    "sigmoid_of_targets": sigmoid,
    "sample_wise": partial(two_way, dims=(1,)),
    "class_wise": partial(two_way, dims=(0,)),
    # The positives of a sample share its probability.
    "multilabel_softmax": lambda z, t: F.cross_entropy(z, t / t.sum(1, keepdim=True)),
    # On cosines: the norms of 1 cancel in the softmax.
    "proxy_nca": lambda x, y, w: F.cross_entropy(18 * F.normalize(x) @ F.normalize(w, dim=0), y),
    # No loss: three products, and little else.
    "products": lambda queries, keys: (queries @ keys.T).square().mean(),
}
"""By the name of the case."""
