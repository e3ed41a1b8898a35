"""
Few-shot: what a class is for each loss
=======================================

Given a few support samples, which class does a loss prefer for a query? NCA looks for neighbours,
the prototypical loss for the nearest mean, and proxy NCA for the nearest learned direction.
"""

from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

import jaxloss

# %%
# Three classes with eight support samples each. The circles come in two clumps, so that their mean
# lies next to the squares. Every query of a grid gets the class with the smallest loss.

rng = np.random.default_rng(0)
centers = np.array([[-1.6, 0.9]] * 4 + [[1.5, 0.7]] * 4 + [[-0.3, 0.1]] * 8 + [[0.6, -1.3]] * 8)
support = jnp.asarray(centers + rng.normal(0, 0.3, (24, 2)))
labels = jnp.repeat(jnp.arange(3), 8)
references = {"references": support, "reference_labels": labels}
proxies = jnp.stack([support[labels == label].mean(axis=0) for label in range(3)], axis=1)

losses = {
    "NCA": partial(jaxloss.nca_loss, temperature=0.2, **references),
    "Prototypical": partial(
        jaxloss.prototypical_loss, temperature=0.5, num_classes=3, **references
    ),
    "Proxy NCA": lambda x, y, **options: jaxloss.proxy_nca_loss(x, y, proxies, **options),
}

x, y = np.meshgrid(np.linspace(-2.6, 2.6, 80), np.linspace(-2.3, 2.0, 66))
queries = jnp.asarray(np.stack([x.ravel(), y.ravel()], axis=1))


def preferred(loss):
    """Returns the class of the smallest loss for each query."""

    def of_class(label):
        return loss(queries, jnp.full(len(queries), label), reduction="none")

    return np.asarray(jnp.argmin(jax.jit(jax.vmap(of_class))(jnp.arange(3)), axis=0))


# %%
# NCA follows both clumps of the circles. The prototypical loss cuts the plane between the means,
# which are crosses. Proxy NCA compares directions, so that its regions are sectors. Training with
# one of them moves the features until its own regions fit.

figure, axes = plt.subplots(1, 3, figsize=(7.5, 2.7))
pale = ListedColormap(["#cfe3f1", "#f8decb", "#cceae0"])
for axis, (name, loss) in zip(axes, losses.items(), strict=True):
    classes = preferred(loss).reshape(x.shape)
    axis.pcolormesh(x, y, classes, cmap=pale, vmin=0, vmax=2, rasterized=True)
    for label, marker in enumerate("os^"):
        own = np.asarray(support)[np.asarray(labels) == label]
        style = {"color": f"C{label}", "markersize": 5, "markeredgecolor": "white"}
        axis.plot(*own.T, marker, markeredgewidth=0.6, **style)
        center = np.asarray(proxies)[:, label]
        if name == "Prototypical":
            axis.plot(*center, "X", color=f"C{label}", markersize=10, markeredgecolor="black")
        if name == "Proxy NCA":
            direction = 1.9 * center / np.linalg.norm(center)
            arrow = {"arrowstyle": "-|>", "color": f"C{label}", "linewidth": 2, "shrinkA": 0}
            axis.annotate("", direction, (0, 0), arrowprops=arrow)
    axis.set_title(name)
    axis.set(aspect="equal", xticks=[], yticks=[], xlim=(-2.6, 2.6), ylim=(-2.3, 2.0))
    axis.spines[:].set_visible(False)
figure.suptitle("The class with the smallest loss, for the same support samples")
plt.show()
