"""
Direct and spectral sum: a place for each loss
==============================================

A classifier uses a subspace of the features: the one that its weights span. The direct sum gives
the classification loss this subspace and a metric loss the rest, so that the two do not pull the
same features in different directions. The spectral sum does this softly, and for any number of
classes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxloss

# %%
# Features have three dimensions. The weights of two classes lie in a plane, and the complement of
# this plane is a line. The arrows are steps down the gradients of the two parts of the direct sum:
# those of the softmax loss lie in the plane, those of NCA along the line.

weights = jnp.array([[1.0, -0.9], [0.55, 0.6], [0.0, 0.0]])
rng = np.random.default_rng(4)
labels = jnp.repeat(jnp.arange(2), 6)
features = 0.9 * weights.T[labels] + jnp.asarray(rng.normal(0, [0.4, 0.4, 0.55], (12, 3)))
metric_loss = partial(jaxloss.nca_loss, temperature=1.0)


def softmax_part(features):
    """Returns the classification loss."""
    return jaxloss.softmax_loss(jaxloss.linear_logits(features, weights), labels)


def metric_part(features):
    """Returns the metric loss of the features in the complement."""
    whole = jaxloss.direct_sum_loss(features, labels, weights, metric_loss=metric_loss)
    return whole - softmax_part(features)


steps = {
    "softmax loss": -np.asarray(jax.jit(jax.grad(softmax_part))(features)),
    "NCA": -np.asarray(jax.jit(jax.grad(metric_part))(features)),
}

figure = plt.figure(figsize=(7.5, 4.4))
figure.set_layout_engine("none")
axis = figure.add_axes((-0.1, -0.1, 1.2, 1.2), projection="3d", computed_zorder=False)
side = np.array([[-1.35, 1.35], [-1.35, 1.35]])
axis.plot_surface(side, side.T, 0 * side, color="C0", alpha=0.1, zorder=0)
axis.plot([0, 0], [0, 0], [-1.15, 1.15], color="0.4", linewidth=1.2, zorder=1)
axis.text(0.05, 0, 1.1, "complement", color="0.3")
axis.text(-1.24, -1.27, 0.03, "classifier's plane", color="C0", fontsize=8, zdir=(1, 0, 0))
for weight in np.asarray(weights).T:
    axis.quiver(0, 0, 0, *weight, color="0.3", linewidth=2, arrow_length_ratio=0.12, zorder=1)
for x, y, z in np.asarray(features):
    axis.plot([x, x], [y, y], [0, z], color="0.7", linewidth=0.8, zorder=1)
for (name, step), color in zip(steps.items(), ("C0", "C1"), strict=True):
    arrows = {"color": color, "length": 7, "linewidth": 2, "arrow_length_ratio": 0.3}
    axis.quiver(*features.T, *step.T, **arrows, label=f"step of {name}", zorder=2)
for label, marker in enumerate("os"):
    points = np.asarray(features)[np.asarray(labels) == label]
    style = {"color": "white", "edgecolor": "black", "s": 34, "depthshade": False}
    axis.scatter(*points.T, marker=marker, **style, label=f"class {label + 1}", zorder=3)
axis.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), zlim=(-1, 1))
axis.set_box_aspect((1, 1, 0.8), zoom=1.05)
axis.view_init(elev=18, azim=-65)
axis.set_axis_off()
figure.legend(loc="lower center", ncols=4)
figure.suptitle("Direct sum: softmax moves features in the classifier's plane, NCA across it")
plt.show()

# %%
# With as many classes as features, the complement is empty. But the classifier hardly uses the
# directions of its small singular values. The spectral sum keeps more of a direction the smaller
# its singular value is, and a power p tunes how much. To measure it, we project the singular
# vectors themselves, and look at what is left of each. The ε of the direct sum lets a little of
# the smallest direction pass.

rng = np.random.default_rng(0)
dim, num_classes = 16, 10
left = np.linalg.qr(rng.normal(size=(dim, dim)))[0][:, :num_classes]
right = np.linalg.qr(rng.normal(size=(num_classes, num_classes)))[0]
values = 3 * 0.6 ** np.arange(num_classes)
weights = jnp.asarray(left * values @ right)
basis = jaxloss.spectral_basis(weights)
vectors = jnp.asarray(np.linalg.svd(np.asarray(weights))[0].T)  # All 16 directions, one per row.


def kept(project):
    """Returns how much a projection keeps of each direction."""
    return np.sum(np.asarray(project(vectors, weights)) * np.asarray(vectors), axis=1)


filters = {"complement": kept(jaxloss.project_complement)}
for power in (1.0, 0.3, 0.1):
    project = partial(jaxloss.project_spectral_complement, power=power, basis=basis)
    filters[f"spectral, p = {power}"] = kept(project)

figure, axes = plt.subplots(1, 2, figsize=(7.5, 3), width_ratios=(1, 1.5))
number = np.arange(1, dim + 1)
axes[0].bar(number, np.pad(basis.values, (0, dim - num_classes)), color="0.55")
axes[0].set_title("Singular values")
axes[0].set(ylabel="singular value of the classifier")
for (name, share), style in zip(filters.items(), ("ko-", "C0s-", "C1^-", "C2D-"), strict=True):
    axes[1].plot(number, share, style, markersize=4, linewidth=1.2, label=name)
axes[1].set_title("Filter")
axes[1].set(ylabel="share that the metric loss sees", ylim=(-0.03, 1.03))
axes[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
for axis in axes:
    axis.set(xlabel="direction", xticks=(1, 5, 10, 16))
    axis.axvspan(num_classes + 0.5, dim + 0.7, color="0.95", zorder=0, linewidth=0)
axes[0].text(11, 2.9, "unused\nby the\nclassifier", fontsize=8, va="top", color="0.3")
figure.suptitle("What the direct and the spectral sum leave to the metric loss")
plt.show()
