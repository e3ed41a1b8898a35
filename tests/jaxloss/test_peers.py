"""Every loss of others in `peers` equals ours, and the site lists how far they are apart.

Where they differ, in odd batches, docs/coming_from.md and docs/coming_from_others.md say it, and
the end of this file shows it.
"""

from functools import partial
from typing import Any

import chex
import jax
import numpy as np
import pytest

import jaxloss
from tests.jaxloss import accuracy
from tests.jaxloss.harness import assert_close
from tests.tolerances import FLOAT32, FLOAT64

pytest.importorskip("torch")
pytest.importorskip("pytorch_metric_learning")

import torch
import torch.nn.functional as F
from pytorch_metric_learning import distances, losses

from tests.jaxloss.peers import PEERS

FIRST = {peer.loss: peer for peer in reversed(PEERS)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(np.float64, FLOAT64), pytest.param(np.float32, FLOAT32, marks=pytest.mark.long)],
    ids=["float64", "float32"],
)
@pytest.mark.parametrize(
    "peer",
    [
        # One option of every loss; `make long` has all of them.
        pytest.param(peer, id=peer.name, marks=[] if FIRST[peer.loss] is peer else pytest.mark.long)
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
