"""The same losses as PyTorch's users write them: vectorised, in float32, from its own functions.

Weights have the layout [d, C] of JAX's forms; `weights.T` is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.benchmark.cases import BASE_CLASSES, GROUPS, MARGIN, SCALE

TorchLoss = Callable[..., Tensor]


def softmax_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy."""
    return F.cross_entropy(logits, labels)


def sigmoid_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy of one class per sample."""
    return multilabel_sigmoid_loss(logits, F.one_hot(labels, logits.shape[1]))


def multilabel_sigmoid_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy, summed over the classes of a sample."""
    targets = targets.to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(logits)


def margin_softmax_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with a margin on the target's logit, as the paper's authors write it."""
    margins = F.one_hot(labels, logits.shape[1]).to(logits.dtype) * MARGIN
    return F.cross_entropy(SCALE * (logits - margins), labels)


def cosine_margin_softmax_loss(features: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The margin on cosines."""
    logits = F.normalize(features) @ F.normalize(weights, dim=0)
    return margin_softmax_loss(logits, labels)


def nca_loss(features: Tensor, labels: Tensor) -> Tensor:
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


def prototypical_loss(features: Tensor, labels: Tensor, *, num_classes: int) -> Tensor:
    """Distances to the class means; the anchor's own mean leaves the anchor out."""
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


def prototypical_by_samples_loss(features: Tensor, labels: Tensor) -> Tensor:
    """The same for classes of any number: `unique` gives their indices."""
    classes, labels = labels.unique(return_inverse=True)
    return prototypical_loss(features, labels, num_classes=len(classes))


def sum_loss(
    features: Tensor,
    labels: Tensor,
    weights: Tensor,
    bias: Tensor,
    metric_features: Tensor | None = None,
) -> Tensor:
    """Softmax and NCA, on the same features or on `metric_features`."""
    softmax = F.cross_entropy(F.linear(features, weights.T, bias), labels)
    return softmax + nca_loss(features if metric_features is None else metric_features, labels)


def direct_sum_loss(
    features: Tensor, labels: Tensor, weights: Tensor, bias: Tensor, *, stopped: bool = False
) -> Tensor:
    """Softmax, and NCA in the complement of the classifier's subspace, which may be a constant."""
    span = weights.detach() if stopped else weights
    gram = span.T @ span + 1e-4 * torch.eye(span.shape[1]).to(span)
    coordinates = torch.cholesky_solve((features @ span).T, torch.linalg.cholesky(gram))
    return sum_loss(features, labels, weights, bias, features - (span @ coordinates).T)


def spectral_sum_loss(
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
    return sum_loss(features, labels, weights, bias, features - within)


def nca_references_loss(
    features: Tensor, labels: Tensor, references: Tensor, reference_labels: Tensor
) -> Tensor:
    """NCA with other rows than the batch."""
    squares = features.square().sum(1)[:, None] + references.square().sum(1)[None, :]
    scores = -(squares - 2 * features @ references.T).clamp(min=0) / features.shape[1]
    same = labels[:, None] == reference_labels[None, :]
    own = scores.masked_fill(~same, -torch.inf).logsumexp(1)
    return (scores.logsumexp(1) - own).mean()


def classifier_loss(features: Tensor, labels: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """Softmax cross-entropy of a linear classifier."""
    return F.cross_entropy(F.linear(features, weights.T, bias), labels)


def group_softmax_loss(features: Tensor, labels: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
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
    targets = labels[:, None].expand(-1, GROUPS).reshape(-1)
    return F.cross_entropy(logits.reshape(-1, logits.shape[2]), targets, reduction="sum") / len(
        features
    )


def prototype_loss(
    features: Tensor, labels: Tensor, prototypes: Tensor, assignment: Tensor
) -> Tensor:
    """Squared cosine distance to the own prototype."""
    targets = prototypes.T[assignment[labels]]
    return (1 - F.cosine_similarity(features, targets)).square().mean()


def dot_regression_loss(
    features: Tensor, labels: Tensor, prototypes: Tensor, assignment: Tensor
) -> Tensor:
    """As its authors write it, with the norms of features detached."""
    targets = prototypes.T[assignment[labels]]
    norms = features.detach().norm(dim=1)
    dots = (features * targets).sum(1)
    return (0.5 * (dots - targets.norm(dim=1) * norms).square() / norms).mean()


def _soft_gap(logits: Tensor, targets: Tensor, dim: int) -> Tensor:
    positive = targets > 0
    # As the authors write it: masked log-sum-exps, and a mean over what has a positive. A finite
    # number instead of the infinity would make the exponential three times as slow.
    hardest_negative = logits.masked_fill(positive, -torch.inf).logsumexp(dim)
    hardest_positive = 4 * (-logits / 4).masked_fill(~positive, -torch.inf).logsumexp(dim)
    has_positive = positive.any(dim)
    gaps = F.softplus(hardest_negative + hardest_positive)
    return torch.where(has_positive, gaps, 0).sum() / has_positive.sum()


def two_way_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The gaps of every class over the samples, and of every sample over the classes."""
    return _soft_gap(logits, targets, dim=0) + _soft_gap(logits, targets, dim=1)


def multilabel_softmax_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with proportions as targets."""
    return F.cross_entropy(logits, targets / targets.sum(1, keepdim=True))


def asymmetric_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """As its authors' code: probabilities, a shift of the negatives', and focusing."""
    p = logits.sigmoid()
    not_q = (1 - p + 0.05).clamp(max=1)
    negatives = -((1 - not_q) ** 4) * not_q.clamp(min=1e-8).log()
    values = torch.where(targets > 0, -F.logsigmoid(logits), negatives)
    return values.sum() / len(logits)


def _rank_weights(logits: Tensor, ranks: Tensor) -> Tensor:
    numbers = torch.arange(1, logits.shape[1] + 1, device=logits.device, dtype=logits.dtype)
    return F.pad(numbers.reciprocal().cumsum(0), (1, 0))[ranks]


def warp_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """All pairs of a positive and a negative; the rank is a constant."""
    positive = targets > 0
    margins = 1 - logits[:, :, None] + logits[:, None, :]
    violated = positive[:, :, None] & ~positive[:, None, :] & (margins > 0)
    ranks = violated.sum(2)
    weights = _rank_weights(logits, ranks) / ranks.clamp(min=1)
    return (weights * (violated * margins).sum(2)).sum() / len(logits)


def robust_multilabel_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """As its authors' code, with all pairs at once and the rank itself; it is a constant."""

    def ramps(margins: Tensor) -> Tensor:
        return (1 - margins).clamp(min=0) - 0.9 * (-0.8 - margins).clamp(min=0)

    positive = targets > 0
    gaps = logits[:, :, None] - logits[:, None, :]
    pairs = positive[:, :, None] & ~positive[:, None, :]
    weights = _rank_weights(logits, (pairs & (gaps < 1)).sum(2))
    ranking = (weights * (pairs * ramps(gaps)).sum(2)).sum()
    return (ranking + 5 * ramps(torch.where(positive, logits, -logits)).sum()) / len(logits)


TORCH_FORMS: Mapping[str, TorchLoss] = {
    "softmax": softmax_loss,
    "sigmoid": sigmoid_loss,
    "margin_softmax": margin_softmax_loss,
    "cosine_margin_softmax": cosine_margin_softmax_loss,
    "nca": nca_loss,
    "prototypical": partial(prototypical_loss, num_classes=BASE_CLASSES),
    "prototypical_by_samples": prototypical_by_samples_loss,
    "sum": sum_loss,
    "direct_sum": direct_sum_loss,
    "direct_sum_stopped": partial(direct_sum_loss, stopped=True),
    "spectral_sum": spectral_sum_loss,
    "spectral_sum_stopped": partial(spectral_sum_loss, stopped=True),
    "spectral_sum_with_basis": spectral_sum_loss,
    "nca_references": nca_references_loss,
    "classifier": classifier_loss,
    "group_softmax": group_softmax_loss,
    "prototype": prototype_loss,
    "dot_regression": dot_regression_loss,
    "sigmoid_of_targets": multilabel_sigmoid_loss,
    "two_way": two_way_loss,
    "sample_wise": partial(_soft_gap, dim=1),
    "class_wise": partial(_soft_gap, dim=0),
    "multilabel_softmax": multilabel_softmax_loss,
    "asymmetric": asymmetric_loss,
    "warp": warp_loss,
    "robust_multilabel": robust_multilabel_loss,
}
"""For every case of `experiments.benchmark.cases` its form in PyTorch."""
