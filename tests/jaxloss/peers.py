"""Losses beside what others publish in PyTorch: packages, and the pseudocode of papers.

A new comparison is a new row of `PEERS`. `test_peers` checks every row, and `accuracy` measures it
for the site. The formulas of `torch_references` are our own, and every loss has one.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from pytorch_metric_learning import distances, losses, miners, reducers
from torch import Tensor

import jaxloss
from tests.jaxloss import harness
from tests.jaxloss.loss_table import make_features, make_sub_centres, make_weights

PACKAGE = "pytorch-metric-learning"


class Peer(NamedTuple):
    """A loss of other authors, and ours with the same options."""

    loss: str
    """The name of our function."""
    options: str
    """The arguments that make the two equal, and are not just numbers; for the site."""
    theirs: str
    source: str
    """The distribution that has it, or "pseudocode"."""
    arrays: tuple[np.ndarray, ...]
    """The differentiated arguments. Their numbers are exact in float32."""
    value: Callable[..., Any]
    """Our loss of JAX arrays."""
    torch_value: Callable[..., Tensor]
    """Their loss of tensors."""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.loss, self.options, self.theirs)))


def exact(*arrays: Any) -> tuple[np.ndarray, ...]:
    """The arrays rounded to float32, in float64."""
    return harness.rounded([*map(np.asarray, arrays)], range(len(arrays)), np.float32)


# Features and labels ----

# Classes of one sample, ignored samples, and duplicates within a class and between classes.
LABELS = np.array([2, 0, 1, 0, -1, 2, 4, 1, 0, 5, -1, 0, 1, 2], np.int32)
PAIRS = np.array([3, 1, -1, 0, 1, 2, 0, 3, -1, 2], np.int32)
REFERENCE_LABELS = np.array([0, 1, 2, 2, 1, 7, 0, 2, 1], np.int32)
(DISTINCT,) = exact(make_features(np.random.default_rng(90), len(LABELS), np.float64))
FEATURES = DISTINCT.copy()
FEATURES[3], FEATURES[7] = FEATURES[1], FEATURES[5]
(REFERENCES,) = exact(make_features(np.random.default_rng(91), len(REFERENCE_LABELS), np.float64))


def of_features(
    options: str,
    ours: Any,
    theirs: Any,
    miner: Any = None,
    *,
    features: np.ndarray = FEATURES,
    labels: np.ndarray = LABELS,
    references: bool = False,
    normalized: bool = False,
) -> Peer:
    """A row of pytorch-metric-learning, which has no ignored labels.

    With `normalized`, ours gets normalised features.
    """

    def value(features, *rows):
        if normalized:
            features = features / jnp.linalg.norm(features, axis=1, keepdims=True)
        named = {"references": rows[0], "reference_labels": REFERENCE_LABELS} if rows else {}
        named = {key: jnp.asarray(x) for key, x in named.items()}
        return ours(features, jnp.asarray(labels), **named)

    def torch_value(features, *rows):
        kept = torch.tensor(labels >= 0)
        anchors = features[kept], torch.tensor(labels)[kept]
        others = (*rows, torch.tensor(REFERENCE_LABELS)) if rows else ()
        pairs = None if miner is None else miner(*anchors, *others)
        return theirs(*anchors, pairs, *others)

    name = f"`{type(theirs).__name__}`" + (f", `{type(miner).__name__}`" if miner else "")
    arrays = (features, REFERENCES) if references else (features,)
    loss = ours.func.__name__
    options = ", ".join(filter(None, (options, "`references`" if references else "")))
    return Peer(loss, options, name, PACKAGE, arrays, value, torch_value)


supcon = partial(jaxloss.supervised_contrastive_loss, temperature=0.3)
multi_similarity = partial(jaxloss.multi_similarity_loss)
of_theirs = losses.MultiSimilarityLoss(alpha=2, beta=50, base=0.5)
distance = distances.LpDistance(power=1)
OF_FEATURES = (
    of_features(
        "on normalised features",
        partial(jaxloss.nca_loss, temperature=0.5),
        losses.NCALoss(softmax_scale=2),
        normalized=True,
    ),
    of_features("", supcon, losses.SupConLoss(temperature=0.3)),
    of_features("", multi_similarity, of_theirs),
    of_features(
        "`mining_margin`",
        partial(multi_similarity, mining_margin=0.1),
        of_theirs,
        miners.MultiSimilarityMiner(epsilon=0.1),
        references=True,
    ),
    # With a scale that keeps losses below 20, above which `torch.nn.Softplus` is rounded.
    of_features(
        "", partial(jaxloss.circle_loss, margin=0.25, scale=5.0), losses.CircleLoss(0.25, 5)
    ),
    # Theirs averages over pairs, which is the mean over anchors for classes of two samples.
    of_features(
        '`denominator="negatives"`',
        partial(supcon, denominator="negatives"),
        losses.NTXentLoss(temperature=0.3),
        features=FEATURES[: len(PAIRS)],
        labels=PAIRS,
    ),
    # Triplets of distinct features: the gradient of theirs at a distance of 0 is arbitrary.
    of_features(
        "",
        partial(jaxloss.triplet_loss, margin=0.3),
        losses.TripletMarginLoss(0.3, distance=distance, reducer=reducers.MeanReducer()),
        miners.BatchHardMiner(),
        features=DISTINCT,
    ),
    of_features(
        '`mining="all"`, `soft`',
        partial(jaxloss.triplet_loss, margin=0.3, mining="all", soft=True),
        losses.TripletMarginLoss(0.3, smooth_loss=True, distance=distance),
        features=DISTINCT,
    ),
)


# Weights ----

NUM_CLASSES, CENTRES = 5, 2
CLASS_LABELS = np.array([2, 0, 1, 0, 3, 2, 3, 1, 0, 2, 1, 0, 1, 2])  # None of class 4.
WEIGHTS, SUB_CENTRES = exact(
    make_weights(np.random.default_rng(130), np.float64, classes=NUM_CLASSES),
    make_sub_centres(np.random.default_rng(131), np.float64),
)


def of_weights(options: str, ours: Any, theirs: Any, weights: Any = WEIGHTS, **their: Any) -> Peer:
    """A row of pytorch-metric-learning, whose losses own their weights."""
    num_classes, dim = weights.shape[1], weights.shape[0]
    module = theirs(num_classes=num_classes, embedding_size=dim, **their).double()
    labels = CLASS_LABELS % num_classes
    ((parameter, _),) = module.named_parameters()

    def value(features, weights):
        return ours(features, jnp.asarray(labels, jnp.int32), weights)

    def torch_value(features, weights):
        # The sub-centres of a class lie side by side in both.
        own = weights.T if parameter == "proxies" else weights.reshape(dim, -1)
        inputs = features, torch.tensor(labels)
        return torch.func.functional_call(module, {parameter: own}, inputs)

    name = f"`{theirs.__name__}`"
    arrays = (FEATURES, weights)
    return Peer(ours.func.__name__, options, name, PACKAGE, arrays, value, torch_value)


face = partial(jaxloss.classifier_loss, similarity="cosine", scale=8.0)
# Angles stay below π, where both have the same formula.
arc_face = partial(face, angular_margin=math.radians(20))
OF_FACE = {"margin": 20, "scale": 8}
anchor = partial(jaxloss.proxy_anchor_loss, margin=0.15, scale=7.0)
# Its softmax has the own proxy, as that of ProxyNCA++.
proxy_nca = partial(jaxloss.proxy_nca_loss, temperature=1 / 3)
sub_centres = partial(losses.SubCenterArcFaceLoss, sub_centers=CENTRES)
sub_centres.__name__ = "SubCenterArcFaceLoss"  # pyright: ignore[reportAttributeAccessIssue]
OF_WEIGHTS = (
    of_weights("`margin`", partial(face, margin=0.35), losses.CosFaceLoss, margin=0.35, scale=8),
    of_weights("`angular_margin`", arc_face, losses.ArcFaceLoss, **OF_FACE),
    of_weights("sub-centres", arc_face, sub_centres, SUB_CENTRES, **OF_FACE),
    of_weights("", anchor, losses.ProxyAnchorLoss, margin=0.15, alpha=7.0),
    of_weights("", proxy_nca, losses.ProxyNCALoss, softmax_scale=3.0),
)


# Two arrays of rows ----

# Two views, some of whose dimensions have a deviation above 1, where the hinge of VICReg is 0.
_rng = np.random.default_rng(150)
FIRST, SECOND = exact(
    FEATURES * np.linspace(0.8, 2.0, FEATURES.shape[1]) + 0.2,
    1.1 * FEATURES + 0.3 * _rng.normal(size=FEATURES.shape),
)
(LOG_SCALE,) = exact(1.3)


def clip(images: Tensor, texts: Tensor, log_scale: Tensor) -> Tensor:
    """Both directions, as open_clip computes them."""
    logits = log_scale.exp() * F.normalize(images) @ F.normalize(texts).T
    own = torch.arange(len(images))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def siglip(images: Tensor, texts: Tensor, log_scale: Tensor) -> Tensor:
    """With a bias of -3."""
    logits = log_scale.exp() * F.normalize(images) @ F.normalize(texts).T - 3.0
    signs = 2 * torch.eye(len(images), dtype=logits.dtype) - 1
    return -F.logsigmoid(signs * logits).sum() / len(images)


def contrastive_rl(states: Tensor, goals: Tensor) -> Tensor:
    """Forward InfoNCE of negative distances, with a penalty on the log-sum-exp."""
    logits = -torch.linalg.vector_norm(states[:, None] - goals, dim=2)
    own = torch.arange(len(states))
    penalty = 0.1 * (logits.logsumexp(1) ** 2).mean()
    return F.cross_entropy(logits, own) + penalty


def ranking(queries: Tensor, passages: Tensor, *, strength: float, margin: float | None) -> Tensor:
    """Sentence-transformers: further passages, and harder or fewer negatives, in one direction.

    With a margin, passages more similar than the right one less this margin are left out.
    """
    cosines, own = F.normalize(queries) @ F.normalize(passages).T, torch.arange(len(queries))
    others = 1 - torch.eye(*cosines.shape)
    logits = 20 * cosines + strength * cosines.detach() * others
    if margin is not None:
        limits = cosines.diagonal()[:, None] - margin
        logits = logits.masked_fill((cosines > limits) & (others > 0), -torch.inf)
    return F.cross_entropy(logits, own)


def koleo(features: Tensor) -> Tensor:
    """DINOv2: the nearest neighbours by inner products, and their distances."""
    units = F.normalize(features, eps=1e-8)
    nearest = (units @ units.T).fill_diagonal_(-1).argmax(1)
    return -torch.log(F.pairwise_distance(units, units[nearest], eps=0) + 1e-8).mean()


def nt_xent(queries: Tensor, keys: Tensor) -> Tensor:
    """Further keys are negatives."""
    labels, key_labels = torch.arange(len(queries)), torch.arange(len(keys))
    return losses.NTXentLoss(temperature=0.2)(queries, labels, ref_emb=keys, ref_labels=key_labels)


def vicreg(first: Tensor, second: Tensor) -> Tensor:
    """It halves the variance term, which the paper does not."""
    loss = losses.VICRegLoss(invariance_lambda=7, variance_mu=6, covariance_v=2, eps=1e-3)
    return loss(first, ref_emb=second)


def barlow_twins(first: Tensor, second: Tensor) -> Tensor:
    """The steps: standardise over the batch, one matrix product, two sums."""
    a = (first - first.mean(0)) / first.std(0, correction=0)
    b = (second - second.mean(0)) / second.std(0, correction=0)
    gap = (a.T @ b / len(a) - torch.eye(a.shape[1], dtype=a.dtype)).pow(2)
    return gap.trace() + 0.05 * (gap.sum() - gap.trace())


VIEWS, RANKED = (FIRST, SECOND), (FIRST[:9], SECOND)
info_nce = partial(jaxloss.info_nce_loss)
one_way = partial(info_nce, symmetric=False)
of_a_ranking = partial(one_way, temperature=1 / 20)
OF_TWO_ARRAYS = (
    Peer(
        *("info_nce_loss", "", "CLIP", "pseudocode", (*VIEWS, LOG_SCALE)),
        lambda x, z, log: info_nce(x, z, temperature=jnp.exp(-log)),
        clip,
    ),
    Peer(
        *("info_nce_loss", "`symmetric=False`", "`NTXentLoss`", PACKAGE, RANKED),
        partial(one_way, temperature=0.2),
        nt_xent,
    ),
    Peer(
        *("sigmoid_contrastive_loss", "", "SigLIP", "pseudocode", (*VIEWS, LOG_SCALE)),
        lambda x, z, log: jaxloss.sigmoid_contrastive_loss(x, z, scale=jnp.exp(log), bias=-3.0),
        siglip,
    ),
    Peer(
        *("info_nce_loss", "`similarity`, `logsumexp_penalty`", "contrastive RL", "pseudocode"),
        VIEWS,
        partial(one_way, temperature=1.0, similarity="negative_distance", logsumexp_penalty=0.1),
        contrastive_rl,
    ),
    Peer(
        *("info_nce_loss", "`hardness`", "`MultipleNegativesRankingLoss`", "pseudocode", RANKED),
        partial(of_a_ranking, hardness=5.0),
        partial(ranking, strength=5.0, margin=None),
    ),
    Peer(
        *("info_nce_loss", "`margin_of_false_negatives`", "`GISTEmbedLoss`", "pseudocode", RANKED),
        partial(of_a_ranking, margin_of_false_negatives=-0.05),
        partial(ranking, strength=0.0, margin=0.05),
    ),
    Peer("koleo_loss", "", "DINOv2", "pseudocode", (DISTINCT,), jaxloss.koleo_loss, koleo),
    Peer(
        *("vicreg_loss", "half of `variance`", "`VICRegLoss`", PACKAGE, VIEWS),
        partial(jaxloss.vicreg_loss, invariance=7.0, variance=3.0, covariance=2.0, epsilon=1e-3),
        vicreg,
    ),
    Peer(
        *("barlow_twins_loss", "", "Barlow Twins", "pseudocode", VIEWS),
        partial(jaxloss.barlow_twins_loss, off_diagonal=0.05),
        barlow_twins,
    ),
)


# Logits ----

(LOGITS,) = exact(_rng.normal(0.2, 1.5, (len(CLASS_LABELS), NUM_CLASSES)))
TARGETS = np.float64(_rng.random(LOGITS.shape) < 0.4)


def of_logits(options: str, ours: Any, labels: Any, name: str, theirs: Any) -> Peer:
    """A row of PyTorch itself."""
    labels, given = jnp.asarray(labels, jnp.int32), torch.tensor(labels)
    functions = lambda x: ours(x, labels), lambda x: theirs(x, given)
    return Peer(ours.func.__name__, options, f"`{name}`", "torch", (LOGITS,), *functions)


OF_LOGITS = (
    of_logits(
        "`label_smoothing`",
        partial(jaxloss.softmax_loss, label_smoothing=0.1),
        CLASS_LABELS,
        "cross_entropy",
        partial(F.cross_entropy, label_smoothing=0.1),
    ),
    of_logits(
        "summed over classes",
        partial(jaxloss.sigmoid_loss),
        TARGETS,
        "binary_cross_entropy_with_logits",
        lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="none").sum(1).mean(),
    ),
)

PEERS = OF_LOGITS + OF_FEATURES + OF_WEIGHTS + OF_TWO_ARRAYS
