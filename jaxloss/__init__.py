"""Losses that shape a feature space, as pure functions for JAX.

A loss takes the scores or features first and the labels second. A classifier, prototypes or proxies
come third, where the loss needs them. A loss of two views takes both, and no labels. All other
arguments are keyword-only.

Shapes use these letters: n samples, m references, d features, C classes, K sub-centres of a class,
M prototypes, G groups. In losses of logits `[n, C]` and in `classifier_loss`, n may stand for any
number of axes, as in logits `[batch, time, C]` with labels `[batch, time]`: the samples are those
of all of them, and `"none"` gives `[batch, time]`. On a mesh, each may be sharded.

Common keywords:
  where: bool `[n]`. False marks padding. A padded sample has no effect, not even as a reference or
    in a class mean. By default no sample is padding. NaN and infinity do no harm there, but in the
    inputs of a network they reach its gradient: fill padded inputs with zeros.
  sample_weights: floats `[n]`, the weights s ≥ 0 of the samples. By default all are 1. A
    negative one of a sample that counts gives NaN.
  reduction: `"mean"` is `Σ s_i ℓ_i / Σ s_i`, `"sum"` is `Σ s_i ℓ_i`, `"none"` gives `s_i ℓ_i` as
    `[n]`. Both sums run over the samples that count; the others are 0 in `"none"`. If no sample
    counts, the mean is 0.
  axis_name: for use inside `jax.shard_map` or `jax.pmap`: the mapped axis, or a tuple of them, over
    which the batch is split. Every device then returns the value of the global batch, and
    `jax.lax.pmean` of the gradients equals the gradient on a single device.

Sharded arrays need no `axis_name`:
  On a mesh of Explicit axes, as newer versions of JAX make it by default, every function reads the
  sharding of its arguments, and the devices divide the work. Arrays of a metric loss, such as its
  references, go into `functools.partial`, not into a closure, and `jax.vmap` runs over dimensions
  that are not sharded. JAX requires that a gradient is taken in `jax.jit` or under `jax.set_mesh`;
  either is enough. A value is replicated, the losses of `"none"` are sharded like the rows, and a
  gradient like its argument. On a mesh of Auto axes, values and gradients are right, too, but
  `jax.jit` decides what a device computes, and gives all pairs of a pairwise loss to each;
  `sharded_loss` divides the work there.

A sample counts if it is not padding, its label is not negative, and the loss is defined for it.

Pairwise losses compare each sample, the anchor, with references:
  references: floats `[m, d]`, such as a second view or class means, or a `Queue` of earlier
    batches, which has labels of its own. An anchor is then compared with all of them and with
    nothing else, not with its batch. No reference can be left out for a single anchor, so do not
    pass the anchors themselves. For the batch and a queue, add two losses. Gradients reach
    references, but no queue. By default they are the other samples of the batch. With `axis_name`,
    they are split over the devices like the batch; a `Queue` is the same on every device.
  reference_labels: integers `[m]`, or targets `[m, C]` beside targets `[n, C]`. A negative label
    means "ignore this reference", as in the part of a queue that is not filled yet.
  reference_where: bool `[m]`. False marks padding.
  block_size: how many rows, or classes, are compared at a time. It limits the memory. Value and
    gradient do not depend on it. By default it suits the shapes and the backend.

Labels:
  Class indices are integers `[n]`. A negative label means "ignore this sample", as padding does.
  A label of C or more gives NaN. "Without an upper limit" means any integer of the dtype. JAX has
  integers of 32 bits unless x64 is enabled, and cuts off the upper bits of larger ones: hashes and
  database keys then become equal or negative. Functions that get such integers as NumPy arrays
  raise an `OverflowError`. Under `jax.jit` and `jax.vmap`, JAX cuts them off before a function can
  see them: number the classes first, with `np.unique(..., return_inverse=True)`.

Targets:
  Multi-label targets are bool, integers or floats `[n, C]`: above 0 positive, 0 negative, below 0
  unknown. An unknown class has no effect. Soft targets of `softmax_loss` and `classifier_loss` are
  floats `[n, C]`, the shares of a sample's classes: one below 0 gives NaN.

Hyperparameters:
  A temperature, a margin and the like are Python numbers or scalar arrays. A traced one has a
  gradient, on which rows that do not count have no effect, and the dtype of the computation. Its
  range is not checked.

Dtypes:
  Features, logits and weights may have any float dtype. bfloat16 and float16 are computed in
  float32. Results are float32, or float64 for float64 inputs. On accelerators, products of
  bfloat16 and float16 arrays are computed from them as they are, which is fast, and added up in
  float32, in which such products are exact: pass features in the dtype of the network. Products of
  float32 arrays have all bits of float32, unless `jax.default_matmul_precision` says otherwise.

Distances:
  They come from inner products. The error of a squared distance D of rows x and y is up to
  `16 ε (‖x − c‖² + D)`, with ε = 1.2e-7 in float32 and c the mean of the references. If groups of
  rows are a thousand times as far apart as the rows within a group, distances within a group are
  rounding errors: divide features by their norms, or compute in float64. In `retrieval_metrics` and
  in semi-hard and all triplets, c is near most rows, even if a few are far away. The distances of
  hard triplets, once they are chosen, and of a query and its own key come from differences.

Outside of `jax.jit`:
  The first call compiles a function as a whole, for its options, shapes and dtypes; later calls run
  the program. A number that changes, such as a temperature, costs one more compilation. Programs
  are kept for the latest 16 combinations of options. Of a loss of your own, the statistics of pairs
  are compiled in the same way; everything else runs operation by operation.

Errors:
  All arguments are checked when a function is traced. A wrong dtype raises `TypeError`. A wrong
  shape or an invalid option raises `ValueError`, and integers that do not fit `OverflowError`. All
  name the argument and what it got. The docstrings list only further conditions, such as the range
  of a hyperparameter.

Losses of your own: `jaxloss.pairs` compares rows in tiles, over devices; `divided` and
`sharded_loss` spread a loss over a mesh; `jaxloss.testing` checks it against all of this.
"""

from jaxloss import pairs, sampling
from jaxloss.core.caching import cached_value_and_grad
from jaxloss.core.sharding import divided, sharded_loss
from jaxloss.features.diagnostics import Discriminability, discriminability
from jaxloss.features.prototypes import (
    PrototypeSeparation,
    assign_prototypes,
    prototype_separation,
    simplex_prototypes,
    uniform_prototypes,
)
from jaxloss.features.retrieval import RetrievalMetrics, retrieval_metrics
from jaxloss.features.subspace import (
    SpectralBasis,
    project_classifier,
    project_complement,
    project_spectral_complement,
    spectral_basis,
    spectral_overlap,
)
from jaxloss.losses.classifier import ClassifierMetrics, classifier_loss
from jaxloss.losses.contrastive import supervised_contrastive_loss
from jaxloss.losses.contrastive_metrics import ContrastiveMetrics
from jaxloss.losses.distillation import score_distillation_loss
from jaxloss.losses.grouping import (
    contiguous_groups,
    discriminative_groups,
    group_softmax_loss,
    random_groups,
)
from jaxloss.losses.hypersphere import (
    class_balanced_lengths,
    dot_regression_loss,
    prototype_loss,
    update_class_means,
)
from jaxloss.losses.integration import direct_sum_loss, spectral_sum_loss, sum_loss
from jaxloss.losses.koleo import koleo_loss
from jaxloss.losses.logits import cosine_logits, linear_logits
from jaxloss.losses.metric import circle_loss, multi_similarity_loss, nca_loss
from jaxloss.losses.multilabel import class_wise_loss, sample_wise_loss, two_way_loss
from jaxloss.losses.multilabel_weighted import (
    asymmetric_loss,
    multilabel_softmax_loss,
    robust_multilabel_loss,
    warp_loss,
)
from jaxloss.losses.prototypical import prototypical_loss
from jaxloss.losses.proxies import proxy_anchor_loss, proxy_nca_loss
from jaxloss.losses.relational import relational_loss
from jaxloss.losses.sigreg import sigreg_loss
from jaxloss.losses.softmax import margin_softmax_loss, sigmoid_loss, softmax_loss
from jaxloss.losses.towers import info_nce_loss, sigmoid_contrastive_loss
from jaxloss.losses.triplets import triplet_loss
from jaxloss.losses.views import VICRegTerms, barlow_twins_loss, vicreg_loss
from jaxloss.pairs.queue import Queue, make_queue, push

__version__ = "0.1.0"

__all__ = [
    "ClassifierMetrics",
    "ContrastiveMetrics",
    "Discriminability",
    "PrototypeSeparation",
    "Queue",
    "RetrievalMetrics",
    "SpectralBasis",
    "VICRegTerms",
    "assign_prototypes",
    "asymmetric_loss",
    "barlow_twins_loss",
    "cached_value_and_grad",
    "circle_loss",
    "class_balanced_lengths",
    "class_wise_loss",
    "classifier_loss",
    "contiguous_groups",
    "cosine_logits",
    "direct_sum_loss",
    "discriminability",
    "discriminative_groups",
    "divided",
    "dot_regression_loss",
    "group_softmax_loss",
    "info_nce_loss",
    "koleo_loss",
    "linear_logits",
    "make_queue",
    "margin_softmax_loss",
    "multi_similarity_loss",
    "multilabel_softmax_loss",
    "nca_loss",
    "pairs",
    "project_classifier",
    "project_complement",
    "project_spectral_complement",
    "prototype_loss",
    "prototype_separation",
    "prototypical_loss",
    "proxy_anchor_loss",
    "proxy_nca_loss",
    "push",
    "random_groups",
    "relational_loss",
    "retrieval_metrics",
    "robust_multilabel_loss",
    "sample_wise_loss",
    "sampling",
    "score_distillation_loss",
    "sharded_loss",
    "sigmoid_contrastive_loss",
    "sigmoid_loss",
    "sigreg_loss",
    "simplex_prototypes",
    "softmax_loss",
    "spectral_basis",
    "spectral_overlap",
    "spectral_sum_loss",
    "sum_loss",
    "supervised_contrastive_loss",
    "triplet_loss",
    "two_way_loss",
    "uniform_prototypes",
    "update_class_means",
    "vicreg_loss",
    "warp_loss",
]
