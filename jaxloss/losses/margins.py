"""Margins by which the logit of a sample's own class is lowered, of classes and of samples."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Integer

from jaxloss.core import checks
from jaxloss.core.batch import AxisName, of_own_class
from jaxloss.core.checks import Number

# Of sin²θ. The derivative of sin θ by cos θ is finite then.
_SMALLEST = 1e-6


class Margins(NamedTuple):
    """The margins of the samples, each a number or `[n]`, finite in every row."""

    cosine: Number | Float[Array, " n"]
    """m, which is subtracted from the target's logit."""
    angle: Number | Float[Array, " n"] | None
    """a in radians, which is added to the target's angle; None if no angle is given."""


def margins_of_samples(
    margins: tuple[Any, Any],
    angles: tuple[Any, Any],
    labels: Integer[Array, " n"],
    valid: Bool[Array, " n"],
    dtype: DTypeLike,
    num_classes: int,
    class_axis_name: AxisName | None = None,
) -> Margins:
    """Checks margins and angles, and adds up those of a sample and of its class.

    Args:
      margins, angles: Of the classes and of the samples, not checked yet.
      labels, valid: Of the samples. Labels are indices among all classes.
      dtype: Of the margins.
      num_classes: The number of classes on this device.
      class_axis_name: As in `classifier_loss`.
    """

    def total(name: str, of_classes: Any, of_samples: Any, **limits: Any) -> Any:
        if isinstance(of_classes, jax.Array | np.ndarray) and of_classes.ndim:
            of_classes = checks.floating(name, of_classes, "C")
            if of_classes.shape[0] != num_classes:
                raise ValueError(
                    f"`{name}` must be a number or have shape [C] with C = {num_classes}, the "
                    f"number of classes, got {of_classes.shape}"
                )
            value = of_own_class(of_classes.astype(dtype), labels, class_axis_name)
        else:
            value = checks.in_range(name, of_classes, dtype, **limits)
        if of_samples is not None:
            of_samples = checks.floating(f"sample_{name}", of_samples, "n")
            checks.same_rows(f"sample_{name}", of_samples, "labels", labels)
            value = value + of_samples.astype(dtype)
        return jnp.where(valid, value, 0) if jnp.ndim(value) else value

    cosine = total("margin", *margins)
    hint = "; it is an angle in radians, such as np.radians(28.6)"
    angle = total("angular_margin", *angles, at_least=0, at_most=math.pi, hint=hint)
    return Margins(cosine, None if isinstance(angle, float) and angle == 0 else angle)


def lowering(margins: Margins, cosines: Float[Array, " n"]) -> Number | Float[Array, " n"]:
    r"""Returns by how much the margins lower the target's logit, which is cos θ.

    .. math:: m + \cos θ - \begin{cases} 1 & θ + a < 0 \\ \cos(θ + a) & 0 ≤ θ + a ≤ π \\
       \cos θ + \cos a - 1 & θ + a > π \end{cases}
    """
    if margins.angle is None:
        return margins.cosine
    a = jnp.asarray(margins.angle, cosines.dtype)
    # The angle selects a case and needs no derivative, which is infinite at 0.
    moved = jnp.arccos(jnp.clip(lax.stop_gradient(cosines), -1, 1)) + lax.stop_gradient(a)
    sines = jnp.sqrt(jnp.maximum(1 - cosines * cosines, _SMALLEST))
    # NaN fails both comparisons and stays visible.
    turned = jnp.where(
        moved < 0,
        cosines - 1,
        jnp.where(moved > jnp.pi, 1 - jnp.cos(a), cosines * (1 - jnp.cos(a)) + sines * jnp.sin(a)),
    )
    return margins.cosine + turned
