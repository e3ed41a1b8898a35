"""Losses beside those of pytorch-metric-learning: equal, and how far apart, as the site lists.

A new comparison is a new row of `PEERS`: a test checks every row, and `accuracy` measures it. Where
the two differ, in odd batches, docs/coming_from.md and docs/coming_from_others.md say it, and the
end of this file shows it.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import accuracy, harness
from tests.jaxloss.harness import assert_close
from tests.jaxloss.loss_table import make_features, make_sub_centres, make_weights
from tests.tolerances import FLOAT32, FLOAT64

pytest.importorskip("torch")
pytest.importorskip("pytorch_metric_learning")

import torch
import torch.nn.functional as F
from pytorch_metric_learning import distances, losses, miners, reducers


class Peer(NamedTuple):
    """A loss of theirs, and ours with the same options."""

    loss: str
    """The name of our function."""
    options: str
    """The arguments that make the two equal, and are not just numbers; for the site."""
    theirs: str
    arrays: tuple[np.ndarray, ...]
    """The differentiated arguments. Their numbers are exact in float32."""
    value: Callable[..., Any]
    """Our loss of JAX arrays."""
    torch_value: Callable[..., torch.Tensor]
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
    """A row of a loss of features, which has no ignored labels.

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
    return Peer(loss, options, name, arrays, value, torch_value)


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
    """A row of a loss that owns its weights."""
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
    return Peer(ours.func.__name__, options, name, arrays, value, torch_value)


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


def nt_xent(queries, keys):
    """Further keys are negatives."""
    labels, key_labels = torch.arange(len(queries)), torch.arange(len(keys))
    return losses.NTXentLoss(temperature=0.2)(queries, labels, ref_emb=keys, ref_labels=key_labels)


def vicreg(first, second):
    """It halves the variance term, which the paper does not."""
    loss = losses.VICRegLoss(invariance_lambda=7, variance_mu=6, covariance_v=2, eps=1e-3)
    return loss(first, ref_emb=second)


OF_TWO_ARRAYS = (
    Peer(
        *("info_nce_loss", "`symmetric=False`", "`NTXentLoss`", (FIRST[:9], SECOND)),
        partial(jaxloss.info_nce_loss, symmetric=False, temperature=0.2),
        nt_xent,
    ),
    Peer(
        *("vicreg_loss", "half of `variance`", "`VICRegLoss`", (FIRST, SECOND)),
        partial(jaxloss.vicreg_loss, invariance=7.0, variance=3.0, covariance=2.0, epsilon=1e-3),
        vicreg,
    ),
)
PEERS = OF_FEATURES + OF_WEIGHTS + OF_TWO_ARRAYS
OFTEN = {peer.loss: peer for peer in reversed(PEERS)}
"""One option of every loss; `make long` has all of them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(np.float64, FLOAT64), pytest.param(np.float32, FLOAT32, marks=pytest.mark.long)],
    ids=["float64", "float32"],
)
@pytest.mark.parametrize(
    "peer",
    [
        pytest.param(peer, id=peer.name, marks=[] if OFTEN[peer.loss] is peer else pytest.mark.long)
        for peer in PEERS
    ],
)
def test_values_and_gradients_are_equal(peer, dtype, tolerance):
    ours, theirs = accuracy.evaluate_peer(peer, dtype)
    assert np.abs(theirs[0]) > 1e-3
    chex.assert_trees_all_equal_shapes(ours[1], theirs[1])
    assert_close(ours, theirs, tolerance)


def test_the_site_lists_every_difference():
    """If not, run the command of `accuracy` again."""
    listed = accuracy.read()
    own = [(row.function.__name__, "", "") for row in accuracy.ROWS]
    assert [d.key for d in listed] == own + [(p.loss, p.options, p.theirs) for p in PEERS]
    assert max(max(d.value, d.gradient) for d in listed) < 1e-9


# What the pages say of odd batches, which no row of `PEERS` shows ----


def floats(numbers) -> Any:
    return np.array(numbers, np.float32)


THREE = floats([[1, 0, 0], [0.6, 0.8, 0], [0, 0.6, 0.8]])
TRIPLE: Any = np.array([0, 0, 1])
COPIES = floats(np.eye(3)[[0, 0, 1, 1, 1, 1]])
IN_PAIRS: Any = np.arange(6) // 2


def of_tensors(theirs, *arrays, **named):
    named = {key: torch.tensor(array) for key, array in named.items()}
    return float(theirs(*map(torch.tensor, arrays), **named))


def test_anchors_and_triplets_that_theirs_leave_out():
    """Terms that round to 0, and the hardest anchors of NCA."""
    ours = jaxloss.supervised_contrastive_loss(COPIES, IN_PAIRS, temperature=0.01, reduction="none")
    # Logarithms of numbers relative to e^100: logits of 100 have the roundings of 100.
    np.testing.assert_allclose(ours, np.log(3) * floats([0, 0, 1, 1, 1, 1]), atol=4 * FLOAT32)
    theirs = of_tensors(losses.SupConLoss(temperature=0.01), COPIES, IN_PAIRS)
    assert theirs == pytest.approx(np.log(3), rel=FLOAT32)

    plain = partial(distances.LpDistance, normalize_embeddings=False)
    x = floats([[0, 0], [30, 0], [0, 0.1], [30, 0.1], [1, 1], [1, 2]])
    ours = np.asarray(jaxloss.nca_loss(x, IN_PAIRS, reduction="none"))
    theirs = of_tensors(losses.NCALoss(distance=plain(power=2)), x, IN_PAIRS)
    # Squared distances of points 30 apart, of which the logits are made, have roundings of 900.
    assert theirs == pytest.approx(ours[4:].mean(), rel=0, abs=30**2 * FLOAT32)
    assert (ours[:4] > 800).all()

    x, labels = floats([[0, 0], [0.1, 0], [1, 0], [201, 0]]), IN_PAIRS[:4]
    ours = jaxloss.triplet_loss(x, labels, mining="all", soft=True, normalize=False)
    theirs = losses.TripletMarginLoss(0.2, smooth_loss=True, distance=plain(power=1))
    # Two of eight underflow.
    assert of_tensors(theirs, x, labels) == pytest.approx(float(ours) * 8 / 6, rel=4 * FLOAT32)


@pytest.mark.parametrize(
    ("loss", "theirs"),
    [
        (jaxloss.supervised_contrastive_loss, losses.SupConLoss()),
        (jaxloss.multi_similarity_loss, losses.MultiSimilarityLoss()),
        (jaxloss.circle_loss, losses.CircleLoss()),
    ],
    ids=["SupConLoss", "MultiSimilarityLoss", "CircleLoss"],
)
def test_losses_of_theirs_are_0_for_one_pair_of_each_kind(loss, theirs):
    anchor, labels = THREE[:1], TRIPLE[:1]
    assert of_tensors(theirs, anchor, labels, ref_emb=THREE[1:], ref_labels=TRIPLE[1:]) == 0
    assert loss(anchor, labels, references=THREE[1:], reference_labels=TRIPLE[1:]) > 0


def test_a_memory_of_their_nca_loss_has_the_sample_itself():
    memory = losses.CrossBatchMemory(losses.NCALoss(), embedding_size=3, memory_size=6)
    ours = jaxloss.nca_loss(COPIES, IN_PAIRS, references=COPIES, reference_labels=IN_PAIRS)
    assert of_tensors(memory, COPIES, IN_PAIRS) == pytest.approx(float(ours), rel=FLOAT32)
    assert ours < 0.9 * jaxloss.nca_loss(COPIES, IN_PAIRS)


@pytest.mark.parametrize(
    ("loss", "theirs", "labels"),
    [
        (jaxloss.nca_loss, losses.NCALoss(), np.arange(3)),
        (jaxloss.softmax_loss, partial(F.cross_entropy, ignore_index=-1), np.full(3, -1)),
    ],
    ids=["nca", "softmax"],
)
def test_a_batch_with_nothing_to_count(loss, theirs, labels):
    """Ours is 0, with a gradient of 0."""
    assert loss(THREE, labels) == 0
    assert np.isnan(of_tensors(theirs, THREE, labels))


def test_the_gradient_of_arc_face_without_that_of_the_angle():
    """Of insightface: the cosines get the gradient of the logits."""
    weights = floats([[1, 0, 0.6], [0, 1, 0.8], [0.5, 0.5, 0]])
    x = torch.tensor(THREE + 0.5, requires_grad=True)
    cosines = F.normalize(x) @ F.normalize(torch.tensor(weights), dim=0)
    shifted = torch.cos(torch.arccos(cosines) + 0.5 * F.one_hot(torch.tensor(TRIPLE), 3))
    loss = partial(jaxloss.classifier_loss, similarity="cosine", scale=8.0, angular_margin=0.5)
    value, gradient = jax.value_and_grad(loss)(floats(THREE + 0.5), TRIPLE, weights)
    for logits, is_ours in ((shifted, True), (cosines + (shifted - cosines).detach(), False)):
        theirs = F.cross_entropy(8 * logits, torch.tensor(TRIPLE))
        assert theirs.item() == pytest.approx(float(value), rel=FLOAT32)
        (found,) = torch.autograd.grad(theirs, x, retain_graph=True)
        assert np.allclose(found.numpy(), gradient, rtol=0, atol=4 * FLOAT32) == is_ours


def asymmetric(logits, targets):
    """ASL of its authors, without focus on the positives."""
    p, q = logits.sigmoid(), (1 - logits.sigmoid() + 0.05).clamp(max=1)
    entropies = targets * p.clamp(min=1e-8).log() + (1 - targets) * q.clamp(min=1e-8).log()
    return -((1 - p * targets - q * (1 - targets)) ** (4 * (1 - targets)) * entropies).sum()


def two_way(logits, targets):
    """Of its author: what is masked, by -100, comes back where logits differ as much."""
    positives = -logits / 4 + torch.where(targets > 0, 0.0, -100.0)
    negatives = logits + torch.where(targets > 0, -100.0, 0.0)
    gaps = (4 * positives.logsumexp(d) + negatives.logsumexp(d) for d in (0, 1))
    return sum(F.softplus(gap).mean() for gap in gaps)


def test_losses_of_many_labels_beyond_their_range():
    every = floats([[1, -2, 0.5], [0, 3, -1], [1, 2, 2]])
    logits, targets = every[:2], floats([[1, 0, 0], [0, 0, 1]])
    loss = partial(jaxloss.asymmetric_loss, reduction="sum")
    ours = float(loss(logits, targets))
    assert of_tensors(asymmetric, logits, targets) == pytest.approx(ours, rel=FLOAT32)
    assert loss(logits, targets * 0.7) == ours
    assert of_tensors(asymmetric, logits, targets * 0.7) < 0.9 * ours
    wrong = torch.tensor([[-50.0]], requires_grad=True)
    asymmetric(wrong, torch.ones(1, 1)).backward()
    assert wrong.grad == 0
    assert jax.grad(loss)(floats([[-50]]), floats([[1]])) == -1

    logits, targets = every, floats(np.eye(3))
    ours = float(jaxloss.two_way_loss(logits, targets))
    assert of_tensors(two_way, logits, targets) == pytest.approx(ours, rel=FLOAT32)
    ours = float(jaxloss.two_way_loss(200 * logits, targets))
    assert of_tensors(two_way, 200 * logits, targets) > 1.1 * ours
