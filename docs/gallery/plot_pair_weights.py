"""
Temperature and margin: how hard a pair pulls
=============================================

The derivative of a loss by the similarity of a pair is the weight of this pair. A temperature
decides how fast the weight falls for easy pairs, and a margin where it starts to fall.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxloss

# %%
# An anchor has one positive and two negatives, all of them unit vectors. One cosine varies, and
# ``jax.grad`` gives the weight. One compiled function serves all values of an option.

cosines = jnp.linspace(-0.98, 0.98, 197)


def unit(cosine):
    """Returns a unit vector at a cosine from the anchor."""
    return jnp.stack([cosine, jnp.sqrt(1 - cosine**2)])


def weights_by_cosine(loss, option, values, make_cosines):
    """Returns |∂loss/∂cosine| for each value of an option, as an array [values, cosines]."""

    def value(cosine, option_value):
        references = jax.vmap(unit)(jnp.stack([*map(jnp.asarray, make_cosines(cosine))]))
        others = {"references": references, "reference_labels": jnp.array([0, 1, 1])}
        anchor, label = jnp.array([[1.0, 0.0]]), jnp.array([0])
        return loss(anchor, label, **others, **{option: option_value})

    of_cosines = jax.vmap(jax.grad(value), (0, None))
    return np.abs(jax.jit(jax.vmap(of_cosines, (None, 0)))(cosines, jnp.array(values)))


temperatures = (1.0, 0.3, 0.1)
by_temperature = weights_by_cosine(
    jaxloss.supervised_contrastive_loss, "temperature", temperatures, lambda s: (0.5, s, 0.0)
)
scales = (5.0, 15.0, 50.0)
by_scale = weights_by_cosine(
    jaxloss.multi_similarity_loss, "negative_scale", scales, lambda s: (0.5, s, -0.9)
)
margins = (0.1, 0.25, 0.4)
by_margin = weights_by_cosine(jaxloss.circle_loss, "margin", margins, lambda s: (s, 0.2, 0.0))

# %%
# On the left, the supervised contrastive loss: at a low temperature, a negative has a weight only
# if it is about as close as the positive. In the middle, the scale of the multi-similarity loss
# does the same at its threshold. On the right, the circle loss: the weight of a positive falls with
# its cosine, and a larger margin lets go of it earlier.

figure, axes = plt.subplots(1, 3, figsize=(7.5, 3.1))
panels = (
    ("Supervised contrastive", "T = {}", temperatures, by_temperature),
    ("Multi-similarity", "β = {:g}", scales, by_scale),
    ("Circle", "m = {}", margins, by_margin),
)
for axis, (title, name, values, weights) in zip(axes, panels, strict=True):
    for value, weight, style in zip(values, weights, ("-", "--", ":"), strict=True):
        axis.plot(cosines, weight / weight.max(), style, label=name.format(value))
    axis.set_title(title)
    axis.set(xlabel="cosine of the negative", xticks=(-1, -0.5, 0, 0.5, 1), ylim=(0, 1.03))
axes[0].set(ylabel="weight / largest weight")
axes[0].legend(loc="upper left", bbox_to_anchor=(0, 0.8))
axes[1].legend(loc="upper left", bbox_to_anchor=(0, 0.8))
axes[2].set(xlabel="cosine of the positive")
axes[2].legend(loc="upper right")
for axis, text in zip(axes, ("cosine of\nthe positive", "threshold"), strict=False):
    axis.axvline(0.5, color="0.75", linewidth=1, zorder=0)
    axis.text(0.46, 1.02, text, ha="right", va="top", fontsize=8, color="0.4")
figure.suptitle("The weight of a pair against its cosine: temperature, scale and margin")
plt.show()

# %%
# A triplet has a weight of 1 or of 0. The margin decides how far beyond the positive a negative
# still has a weight; ``soft=True`` makes the step smooth. Here the anchor is the origin of a line,
# and the positive is at a distance of 1.

distances = jnp.linspace(0.02, 2.5, 400)


def weights_by_distance(margins, soft):
    """Returns |∂loss/∂distance| of the negative for each margin, [margins, distances]."""

    def value(distance, margin):
        references = jnp.stack([jnp.array([-1.0]), distance[None]])
        others = {"references": references, "reference_labels": jnp.array([0, 1])}
        options = {"margin": margin, "soft": soft, "normalize": False}
        return jaxloss.triplet_loss(jnp.zeros((1, 1)), jnp.array([0]), **others, **options)

    of_distances = jax.vmap(jax.grad(value), (0, None))
    return np.abs(jax.jit(jax.vmap(of_distances, (None, 0)))(distances, jnp.array(margins)))


figure, axis = plt.subplots(figsize=(6, 2.8))
margins = (0.2, 0.6, 1.0)
for margin, weight, style in zip(
    margins, weights_by_distance(margins, soft=False), ("-", "--", ":"), strict=True
):
    axis.plot(distances, weight, style, label=f"m = {margin}")
axis.plot(distances, weights_by_distance((0.0,), soft=True)[0], "-.", label="m = 0, soft")
axis.axvline(1, color="0.75", linewidth=1, zorder=0)
axis.text(0.96, 0.03, "distance of\nthe positive", ha="right", fontsize=8, color="0.4")
axis.set(xlabel="distance of the negative", ylabel="weight", ylim=(-0.02, 1.05))
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
figure.suptitle("Triplet loss: the weight of a negative against its distance")
plt.show()
