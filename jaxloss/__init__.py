"""Losses that shape a feature space, as pure functions for JAX.

Every loss takes what is scored and the labels first, then (where it needs one) the classifier,
and everything else by keyword. Four keywords are common to all of them:

- `where`: bool `[n]`. False rows are padding: they take part in nothing, not even as references
  or in a class mean. A negative label has the same effect.
- `sample_weights`: floats `[n]`, the weights s ≥ 0 of the samples.
- `reduction`: `"mean"` is `Σ s_i ℓ_i / Σ s_i` over the samples that count (0 if none does), `"sum"`
  is `Σ s_i ℓ_i`, `"none"` gives the terms `s_i ℓ_i` as `[n]`, 0 where a sample does not count. A
  sample counts if it is neither padding nor ignored and the loss is defined for it.
- `axis_name`: the mapped axis, or a tuple of them, over which the batch is spread. The value is
  then that of the global batch on every device, and `jax.lax.pmean` of the gradients is the
  gradient of one device that holds the whole batch. A `jax.jit` over sharded global arrays needs
  no `axis_name`.

bfloat16 and float16 are computed in float32. A label of C or more gives NaN. Shapes, dtypes and
hyperparameters are checked when a loss is traced.
"""

from jaxloss._diagnostics import Discriminability, discriminability
from jaxloss._grouping import (
    contiguous_groups,
    discriminative_groups,
    group_softmax_loss,
    random_groups,
)
from jaxloss._hypersphere import (
    class_balanced_lengths,
    dot_regression_loss,
    prototype_loss,
    update_class_means,
)
from jaxloss._integration import direct_sum_loss, spectral_sum_loss, sum_loss
from jaxloss._linear import cosine_logits, linear_logits
from jaxloss._metric import nca_loss, prototypical_loss
from jaxloss._multilabel import (
    asymmetric_loss,
    class_wise_loss,
    multilabel_softmax_loss,
    sample_wise_loss,
    two_way_loss,
    warp_loss,
)
from jaxloss._prototypes import (
    PrototypeSeparation,
    assign_prototypes,
    prototype_separation,
    simplex_prototypes,
    uniform_prototypes,
)
from jaxloss._softmax import margin_softmax_loss, sigmoid_loss, softmax_loss
from jaxloss._subspace import (
    project_classifier,
    project_complement,
    project_spectral_complement,
    spectral_overlap,
)

__version__ = "0.1.0"

__all__ = [
    "Discriminability",
    "PrototypeSeparation",
    "assign_prototypes",
    "asymmetric_loss",
    "class_balanced_lengths",
    "class_wise_loss",
    "contiguous_groups",
    "cosine_logits",
    "direct_sum_loss",
    "discriminability",
    "discriminative_groups",
    "dot_regression_loss",
    "group_softmax_loss",
    "linear_logits",
    "margin_softmax_loss",
    "multilabel_softmax_loss",
    "nca_loss",
    "project_classifier",
    "project_complement",
    "project_spectral_complement",
    "prototype_loss",
    "prototype_separation",
    "prototypical_loss",
    "random_groups",
    "sample_wise_loss",
    "sigmoid_loss",
    "simplex_prototypes",
    "softmax_loss",
    "spectral_overlap",
    "spectral_sum_loss",
    "sum_loss",
    "two_way_loss",
    "uniform_prototypes",
    "update_class_means",
    "warp_loss",
]
