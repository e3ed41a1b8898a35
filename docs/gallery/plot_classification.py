"""
Classification losses as landscapes
===================================

A linear classifier of three classes in a plane. For every feature of the plane, the picture shows
the loss if the first class is its label, and the step down the gradient.
"""

from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm

import jaxloss

# %%
# Softmax pushes a feature on for ever, ever more gently. Label smoothing has a valley: beyond it a
# feature moves back, since the smoothed targets ask for some of the other classes. The sigmoid loss
# asks each class for a yes or no: the feature must also be on the far side of the other classes,
# whatever the first one says. Arrows have the square root of the length of a step.

angles = np.radians([90, 210, 330])
weights = jnp.asarray(1.6 * np.stack([np.cos(angles), np.sin(angles)]))
losses = {
    "Softmax": jaxloss.softmax_loss,
    "Label smoothing, ε = 0.3": partial(jaxloss.softmax_loss, label_smoothing=0.3),
    "Sigmoid": jaxloss.sigmoid_loss,
}


def landscape(loss, side):
    """Returns features [side², 2] on a grid, their losses and their steps."""
    grid = np.linspace(-2.6, 2.6, side)
    features = jnp.asarray(np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2))
    labels = jnp.zeros(len(features), jnp.int32)

    def values(features):
        return loss(jaxloss.linear_logits(features, weights), labels, reduction="none")

    gradient = jax.jit(jax.grad(lambda x: jnp.sum(values(x))))
    return np.asarray(features), np.asarray(values(features)), -np.asarray(gradient(features))


figure, axes = plt.subplots(1, 3, figsize=(7.5, 3.1), sharex=True, sharey=True)
for axis, (name, loss) in zip(axes, losses.items(), strict=True):
    features, values, _ = landscape(loss, 61)
    x, y = (features[:, k].reshape(61, 61) for k in range(2))
    levels = np.geomspace(0.1, 12, 13)
    shades = axis.contourf(
        x, y, values.reshape(61, 61), levels, cmap="Blues", norm=LogNorm(0.1, 80), extend="both"
    )
    features, _, steps = landscape(loss, 12)
    lengths = np.linalg.norm(steps, axis=1, keepdims=True)
    axis.quiver(*features.T, *(steps / lengths**0.5).T, angles="xy", color="0.15", width=0.007)
    for k, weight in enumerate(np.asarray(weights).T / 1.6):
        axis.annotate(
            str(k + 1),
            2.25 * weight,
            ha="center",
            va="center",
            color="white",
            bbox={"boxstyle": "circle", "facecolor": f"C{k}", "linewidth": 0},
        )
    axis.set_title(name)
    axis.set(aspect="equal", xticks=[], yticks=[], xlim=(-2.6, 2.6), ylim=(-2.6, 2.6))
    axis.spines[:].set_visible(False)
bar = figure.colorbar(shades, ax=axes, shrink=0.85, label="loss", ticks=[0.1, 0.5, 1, 5])
bar.ax.set_yticklabels(["0.1", "0.5", "1", "5"])
figure.suptitle("Loss of a feature with label 1 (shades), and its step (arrows)")
plt.show()
