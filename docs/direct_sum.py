"""Draws docs/direct-sum.png: where a sum and a direct sum of two losses push the features.

    python docs/direct_sum.py

Two classes of features in a plane, and a classifier that spans its horizontal axis. Each feature
has two arrows: the step down the gradient of the softmax loss, and that of NCA. Everything is
computed by jaxloss; the plane is embedded in three dimensions, since a direct sum needs more
features than classes.
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxloss

CLASSIFIER = jnp.array([[1.0, -1.0], [0.0, 0.0], [0.0, 0.0]])
COLORS = {"softmax loss": "#0072b2", "NCA": "#d55e00"}
QUIET = {"ha": "left", "va": "bottom", "color": "0.4", "fontsize": 9}
metric_loss = partial(jaxloss.nca_loss, temperature=1.0)


def make_features() -> tuple[jax.Array, jax.Array]:
    """Features [n, 3] in the plane of the first two axes, and labels [n]."""
    right = [(0.25, 0.75), (1.35, 0.8), (0.55, 0.2), (1.5, 0.15), (0.95, -0.5), (-0.3, -0.15)]
    left = [(-1.4, 0.5), (-0.6, 0.95), (-1.7, -0.15), (-0.95, -0.3), (-1.3, -0.85), (-0.2, -0.8)]
    plane = jnp.array(right + left)
    labels = jnp.repeat(jnp.arange(2), jnp.array([len(right), len(left)]))
    return jnp.pad(plane, ((0, 0), (0, 1))), labels


def steps(loss, features: jax.Array, labels: jax.Array) -> np.ndarray:
    """Steps [n, 2] down the gradient of a loss."""
    return -np.asarray(jax.grad(loss)(features, labels))[:, :2]


def softmax(features, labels):
    """Softmax loss of the classifier."""
    return jaxloss.softmax_loss(jaxloss.linear_logits(features, CLASSIFIER), labels)


def integrated(loss, features, labels):
    """The metric part of a sum or direct sum."""
    whole = loss(features, labels, CLASSIFIER, metric_loss=metric_loss)
    return whole - softmax(features, labels)


def main() -> None:
    """Draws and writes the picture."""
    features, labels = make_features()
    panels = {
        "Sum: softmax + NCA": jaxloss.sum_loss,
        "Direct sum: softmax ⊕ NCA": jaxloss.direct_sum_loss,
    }
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharex=True, sharey=True)
    for axis, (title, loss) in zip(axes, panels.items(), strict=True):
        axis.axhline(0, color="0.6", linewidth=1.2, zorder=0)
        axis.text(-2.15, 0.04, "classifier\nsubspace", **QUIET)
        parts = {"softmax loss": softmax, "NCA": partial(integrated, loss)}
        for name, part in parts.items():
            arrows = steps(part, features, labels)
            axis.quiver(
                *features[:, :2].T,
                *arrows.T,
                **{"angles": "xy", "scale_units": "xy", "scale": 0.16, "width": 0.006},
                color=COLORS[name],
                label=f"step of the {name}" if name != "NCA" else "step of NCA",
            )
        for label, marker in enumerate("os"):
            points = features[labels == label]
            axis.scatter(
                *points[:, :2].T,
                **{"marker": marker, "s": 34, "zorder": 3},
                color="white",
                edgecolor="black",
                label=f"features of class {label + 1}",
            )
        axis.set_title(title, loc="left", fontweight="bold", fontsize=11)
        axis.set(xlim=(-2.2, 2.2), ylim=(-1.35, 1.35), aspect="equal", xticks=[], yticks=[])
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(Path(__file__).with_name("direct-sum.png"), dpi=220)


if __name__ == "__main__":
    main()
