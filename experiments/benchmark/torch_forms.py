"""The same losses as PyTorch's users write them: vectorised, from its own functions.

Weights have the layout [d, C] of JAX's forms; `weights.T` is a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.benchmark.cases import ANGLE, BASE_CLASSES, FACE_SCALE, GROUPS, MARGIN, SCALE


def _among(values: Tensor, mask: Tensor, dim: int = 1) -> Tensor:
    """The log-sum-exp of the values in a mask."""
    return values.masked_fill(~mask, -torch.inf).logsumexp(dim)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of the values in a mask; NaN elsewhere does no harm."""
    return torch.where(mask, values, 0).sum() / mask.sum()


def _cosines(features: Tensor, weights: Tensor) -> Tensor:
    return F.normalize(features) @ F.normalize(weights, dim=0)


def sigmoid(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of classes or multi-hot targets, summed over those of a sample."""
    if targets.ndim == 1:
        targets = F.one_hot(targets, logits.shape[1])
    targets = targets.to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(logits)


def margin_softmax(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with a margin on the target's logit, as the paper's authors write it."""
    return F.cross_entropy(SCALE * (logits - MARGIN * F.one_hot(labels, logits.shape[1])), labels)


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
    return _mean(-probability.clamp(min=1e-30).log(), same_class.sum(1) > 1)


def nca_references(
    features: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor
) -> Tensor:
    squares = features.square().sum(1)[:, None] + references.square().sum(1)[None, :]
    scores = -(squares - 2 * features @ references.T).clamp(min=0) / features.shape[1]
    own = _among(scores, labels[:, None] == reference_labels[None, :])
    return (scores.logsumexp(1) - own).mean()


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
    return _mean(F.cross_entropy(logits, labels, reduction="none"), own_size > 1)


def classifier(features: Tensor, labels: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(features, weights.T, bias), labels)


def sum_of_losses(features: Tensor, *layer: Tensor, within: Tensor | None = None) -> Tensor:
    """Softmax and NCA, the latter without the part `within` of the features."""
    metric_features = features if within is None else features - within
    return classifier(features, *layer) + nca(metric_features, layer[0])


def direct_sum(
    features: Tensor, labels: Tensor, weights: Tensor, bias: Tensor, *, stopped: bool = False
) -> Tensor:
    """Softmax, and NCA in the complement of the classifier's subspace, which may be a constant."""
    span = weights.detach() if stopped else weights
    gram = span.T @ span + 1e-4 * torch.eye(span.shape[1]).to(span)
    coordinates = torch.cholesky_solve((features @ span).T, torch.linalg.cholesky(gram))
    return sum_of_losses(features, labels, weights, bias, within=(span @ coordinates).T)


def spectral_sum(features: Tensor, *arrays: Tensor, stopped: bool = False) -> Tensor:
    """Softmax, and NCA in the soft complement; `arrays` may end in singular vectors and values."""
    layer, basis = arrays[:3], arrays[3:]
    if not basis:
        span = layer[1].detach() if stopped else layer[1]
        basis = torch.linalg.svd(span, full_matrices=False)[:2]
    vectors, values = basis
    within = ((features @ vectors) * (values / values[0]) ** 0.3) @ vectors.T
    return sum_of_losses(features, *layer, within=within)


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
        gaps = _among(logits, ~positive, dim) + 4 * _among(-logits / 4, positive, dim)
        values.append(_mean(F.softplus(gaps), positive.any(dim)))
    return sum(values[1:], values[0])


def asymmetric(logits: Tensor, targets: Tensor) -> Tensor:
    """As its authors' code: probabilities, a shift of the negatives', and focusing."""
    p = logits.sigmoid()
    not_q = (1 - p + 0.05).clamp(max=1)
    negatives = -((1 - not_q) ** 4) * not_q.clamp(min=1e-8).log()
    values = torch.where(targets > 0, -F.logsigmoid(logits), negatives)
    return values.sum() / len(logits)


def _gaps(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For all pairs of a positive and a negative, which are marked, what the first is ahead by.

    The last array is the sum of 1 / k over the ranks k up to each rank.
    """
    positive = targets > 0
    numbers = torch.arange(1, logits.shape[1] + 1, device=logits.device, dtype=logits.dtype)
    sums = F.pad(numbers.reciprocal().cumsum(0), (1, 0))
    pairs = positive[:, :, None] & ~positive[:, None, :]
    return logits[:, :, None] - logits[:, None, :], pairs, sums


def warp(logits: Tensor, targets: Tensor) -> Tensor:
    """All pairs of a positive and a negative; the rank is a constant."""
    gaps, pairs, sums = _gaps(logits, targets)
    violated = pairs & (gaps < 1)
    ranks = violated.sum(2)
    weights = sums[ranks] / ranks.clamp(min=1)
    return (weights * (violated * (1 - gaps)).sum(2)).sum() / len(logits)


def robust_multilabel(logits: Tensor, targets: Tensor) -> Tensor:
    """As its authors' code, with all pairs at once and the rank itself; it is a constant."""

    def ramps(margins: Tensor) -> Tensor:
        return (1 - margins).clamp(min=0) - 0.9 * (-0.8 - margins).clamp(min=0)

    gaps, pairs, sums = _gaps(logits, targets)
    weights = sums[(pairs & (gaps < 1)).sum(2)]
    ranking = (weights * (pairs * ramps(gaps)).sum(2)).sum()
    return (ranking + 5 * ramps(torch.where(targets > 0, logits, -logits)).sum()) / len(logits)


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
    values = F.softplus(_among(logits, negative)[:, None] - logits)
    return (values * positive).sum() / positive.sum()


def info_nce(
    queries: Tensor, keys: Tensor, own_keys: Tensor | None = None, *, metrics: bool = False
) -> Tensor:
    """As in CLIP: rows and columns of one matrix; `own_keys` are further columns of each row.

    With `metrics`, it computes accuracy, mean similarities and log-sum-exp of the same matrix.
    """
    queries, numbers = F.normalize(queries), torch.arange(len(queries), device=queries.device)
    cosines = queries @ F.normalize(keys).T
    logits = rows = cosines / 0.07
    if own_keys is not None:
        mined = (queries[:, None] * F.normalize(own_keys, dim=2)).sum(2) / 0.07
        rows = torch.cat([logits, mined], 1)
    loss = (F.cross_entropy(rows, numbers) + F.cross_entropy(logits.T, numbers)) / 2
    if not metrics:
        return loss
    with torch.no_grad():
        accuracy = (logits.argmax(1) == numbers).to(logits).mean()
        own, number = cosines.diagonal().sum(), len(queries)
        others = (cosines.sum() - own) / (number * (number - 1))
        computed = accuracy + own / number + others + logits.logsumexp(1).mean()
    return loss + 0 * computed


def sigmoid_contrastive(queries: Tensor, keys: Tensor) -> Tensor:
    """As in SigLIP, with `softplus(-z) = softplus(z) - z` for the positives."""
    logits = 10 * F.normalize(queries) @ F.normalize(keys).T - 10
    return (F.softplus(logits).sum() - logits.diagonal().sum()) / len(queries)


def multi_similarity(features: Tensor, labels: Tensor) -> Tensor:
    cosines, positive, negative = _pairs(features, labels)
    pull = _among(-2 * (cosines - 0.5), positive)
    push = _among(50 * (cosines - 0.5), negative)
    return (F.softplus(pull) / 2 + F.softplus(push) / 50).mean()


def circle(features: Tensor, labels: Tensor) -> Tensor:
    cosines, positive, negative = _pairs(features, labels)
    fixed = cosines.detach()
    pull = _among(-80 * (1.4 - fixed).relu() * (cosines - 0.6), positive)
    push = _among(80 * (fixed + 0.4).relu() * (cosines - 0.4), negative)
    return F.softplus(pull + push).mean()


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
    counts = negative.sum(1, keepdim=True)
    return _distances(cosines.gather(1, where)), positives > 0, _distances(negatives), counts


def triplet_semihard(features: Tensor, labels: Tensor) -> Tensor:
    """A binary search for every positive among the sorted negatives."""
    positives, exists, negatives, counts = _sorted_pairs(features, labels)
    nearest = torch.searchsorted(negatives.detach(), positives.detach(), right=True)
    values = (positives - negatives.gather(1, torch.minimum(nearest, counts - 1)) + 0.2).relu()
    return (values * exists).sum() / exists.sum()


def triplet_all(features: Tensor, labels: Tensor) -> Tensor:
    """The same, with the sums of the sorted negatives: no array has n³ elements."""
    positives, exists, negatives, counts = _sorted_pairs(features, labels)
    limits = positives + 0.2
    number = torch.searchsorted(negatives.detach(), limits.detach())
    number = torch.minimum(number, counts) * exists
    sums = F.pad(negatives.cumsum(1), (1, 0)).gather(1, number)
    return ((number * limits - sums) * exists).sum() / number.sum()


def proxy_anchor(features: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
    cosines, own = _cosines(features, proxies), F.one_hot(labels, proxies.shape[1]).bool()
    pull = F.softplus(_among(-32 * (cosines - 0.1), own, 0))
    push = F.softplus(_among(32 * (cosines + 0.1), ~own, 0))
    return _mean(pull, own.any(0)) + push.mean()


def arcface(features: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The angle is added by cosines and sines of sums, without `acos`."""
    cosines, angle = _cosines(features, weights), torch.tensor(ANGLE)
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
    first, second = (F.normalize(view - view.mean(0), dim=0) for view in (first, second))
    correlations = first.T @ second
    own = correlations.diagonal()
    return (1 - own).square().sum() + 5e-3 * (correlations.square().sum() - own.square().sum())


def sigreg(features: Tensor, _seed: Tensor, directions: Tensor) -> Tensor:
    """As its authors' code."""
    t = torch.linspace(0, 3, 17, device=features.device)
    target, weights = (-t.square() / 2).exp(), torch.full_like(t, 3 / 8)
    weights[[0, -1]] = 3 / 16
    points = (features @ directions).unsqueeze(-1) * t
    gaps = (points.cos().mean(0) - target).square() + points.sin().mean(0).square()
    return (gaps @ (weights * target) * len(features)).mean()


_FORMS = (
    *(sigmoid, margin_softmax, two_way, asymmetric, warp, robust_multilabel),
    *(classifier, group_softmax, proxy_anchor, arcface, prototype, dot_regression),
    *(direct_sum, spectral_sum, prototypical, nca, nca_references),
    *(supervised_contrastive, nt_xent, multi_similarity, circle),
    *(triplet_hard, triplet_semihard, triplet_all),
    *(info_nce, sigmoid_contrastive, vicreg, barlow_twins, sigreg),
)
FORMS: dict[str, Callable[..., Any]] = {form.__name__: form for form in _FORMS} | {
    "softmax": F.cross_entropy,
    "cosine_margin_softmax": lambda x, y, w: margin_softmax(_cosines(x, w), y),
    "sum": sum_of_losses,
    "prototypical": partial(prototypical, num_classes=BASE_CLASSES),
    "prototypical_by_samples": prototypical,
    "direct_sum_stopped": partial(direct_sum, stopped=True),
    "spectral_sum_stopped": partial(spectral_sum, stopped=True),
    "spectral_sum_with_basis": spectral_sum,
    "info_nce_own_keys": info_nce,
    "info_nce_metrics": partial(info_nce, metrics=True),
    "sigmoid_of_targets": sigmoid,
    "sample_wise": partial(two_way, dims=(1,)),
    "class_wise": partial(two_way, dims=(0,)),
    # The positives of a sample share its probability.
    "multilabel_softmax": lambda z, t: F.cross_entropy(z, t / t.sum(1, keepdim=True)),
    # On cosines: the norms of 1 cancel in the softmax.
    "proxy_nca": lambda x, y, w: F.cross_entropy(18 * _cosines(x, w), y),
    # No loss: three products, and little else.
    "products": lambda queries, keys: (queries @ keys.T).square().mean(),
}
"""By the name of the case."""


@cache
def package_forms() -> dict[str, Callable[..., Any]]:
    """By the name of the case, the classes of pytorch-metric-learning."""
    from pytorch_metric_learning import losses, miners, reducers

    def with_weights(loss: type[torch.nn.Module], **options: float) -> Callable[..., Any]:
        """A loss that owns its proxies or its classifier: it is given those of the benchmark."""

        @cache
        def module(dim: int, num_classes: int) -> torch.nn.Module:
            return loss(num_classes=num_classes, embedding_size=dim, **options)

        def run(features: Tensor, labels: Tensor, weights: Tensor) -> Any:
            own = module(*weights.shape)
            ((name, _),) = own.named_parameters()
            given = {name: weights if name == "W" else weights.T}
            return torch.func.functional_call(own, given, (features, labels))

        return run

    hardest, hard = (
        miners.BatchHardMiner(),
        losses.TripletMarginLoss(0.2, reducer=reducers.MeanReducer()),
    )
    vicreg = losses.VICRegLoss(variance_mu=50)  # It halves the terms of the variance.
    return {
        "supervised_contrastive": losses.SupConLoss(),
        "multi_similarity": losses.MultiSimilarityLoss(),
        "circle": losses.CircleLoss(),
        "triplet_hard": lambda x, y: hard(x, y, hardest(x, y)),
        "triplet_all": losses.TripletMarginLoss(0.2),
        "proxy_anchor": with_weights(losses.ProxyAnchorLoss),
        "proxy_nca": with_weights(losses.ProxyNCALoss, softmax_scale=9),
        "arcface": with_weights(losses.ArcFaceLoss, margin=math.degrees(ANGLE), scale=FACE_SCALE),
        "vicreg": lambda first, second: vicreg(first, ref_emb=second),
    }
