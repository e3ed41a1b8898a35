"""
Group softmax: every group of features has to classify
======================================================

Softmax has a small loss when a few strong features decide. Group softmax ranks the features of each
sample by how much they raise the logit of its class above the mean of the others, cuts the ranking
into groups, and gives each group a softmax loss of its own. So weak features have to learn, too.
"""

from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

import jaxloss

# %%
# Ten samples of 24 features, in three groups. Every sample has its own grouping: the same feature
# speaks for one class and against another.

rng = np.random.default_rng(1)
labels = jnp.asarray(np.repeat(np.arange(5), 2))
weights = jnp.asarray(rng.normal(0, 0.5, (24, 5)))
features = jnp.asarray(rng.normal(0, 1, (10, 24))) + 0.8 * weights.T[labels]
groups = jaxloss.discriminative_groups(features, labels, weights, num_groups=3)

figure, axis = plt.subplots(figsize=(7.5, 3.3))
names = ("least discriminative", "middle", "most discriminative")
colors = ("#e6e6e6", "#56b4e9", "#0072b2")
image = axis.imshow(groups, cmap=ListedColormap(colors), vmin=-0.5, vmax=2.5, aspect="auto")
axis.set(xlabel="feature", ylabel="sample (class)", xticks=range(0, 24, 2))
axis.set_yticks(range(10), [f"{i + 1} ({c + 1})" for i, c in enumerate(labels.tolist())])
axis.set_xticks(np.arange(25) - 0.5, minor=True)
axis.set_yticks(np.arange(11) - 0.5, minor=True)
axis.grid(which="minor", color="white", linewidth=1.2)
axis.tick_params(which="both", length=0)
axis.spines[:].set_visible(False)
handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors]
figure.legend(handles, names, loc="outside lower center", ncols=3)
figure.suptitle("The groups of each sample's features")
plt.show()

# %%
# For every sample and every grouping, softmax loss ≤ tight bound (type I) ≤ loose bound (type II):
# Proposition 1 of the paper. A sample that softmax is done with still has a large loss here, since
# its weakest group alone would be wrong. On the right, features and classifier descend the loose
# bound together, and the order holds in every step.

losses = {"loose bound (type II)": (3, "loose"), "tight bound (type I)": (3, "tight")}
losses["softmax"] = (1, "loose")  # A single group.


def loss_of(num_groups, bound, reduction="none"):
    """Returns a loss of features and weights."""
    options = {"num_groups": num_groups, "bound": bound, "reduction": reduction}
    return lambda x, w: jaxloss.group_softmax_loss(x, labels, w, **options)


@jax.jit
def step(parameters, _):
    """One step down the loose bound, and the three losses before it."""
    before = jnp.stack([loss_of(*options)(*parameters) for options in losses.values()])
    gradients = jax.grad(loss_of(3, "loose", "sum"), argnums=(0, 1))(*parameters)
    return jax.tree.map(lambda x, g: x - 0.05 * g, parameters, gradients), before


_, values = jax.lax.scan(step, (features, weights), length=31)  # [steps, losses, samples]

figure, axes = plt.subplots(1, 2, figsize=(7.5, 3))
order = np.argsort(values[0, 2])
for k, (name, marker) in enumerate(zip(losses, "s^o", strict=True)):
    axes[0].plot(np.arange(1, 11), values[0, k, order], marker, label=name)
    style = {"markersize": 4, "markevery": 3, "linewidth": 1.3}
    axes[1].plot(values[:, k].mean(axis=1), marker + "-", **style)
axes[0].vlines(np.arange(1, 11), values[0, 2, order], values[0, 0, order], color="0.85", zorder=0)
axes[0].set_title("Samples, at the start")
axes[0].set(xlabel="sample, by its softmax loss", ylabel="loss", xticks=range(1, 11))
axes[1].set_title("Mean, in training")
axes[1].set(xlabel="step", ylabel="mean loss")
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
figure.suptitle("Softmax loss ≤ tight bound ≤ loose bound")
plt.show()

# %%
# The gradient of softmax for the features of a sample is :math:`W (p - e_y)`, eq. (B.1) of the
# paper's supplement. The paper counts min(C, D) directions. In fact there are min(C − 1, D), because
# the numbers of :math:`p - e_y` sum to 0. Group softmax has such a gradient for each part of the
# features, eq. (B.2), and with the same G groups for all samples min(G (C − 1), D) directions; the
# paper has min(G C, D). These are the lines on the left. The markers are the rank of the gradient of
# 512 samples. Groups that differ from sample to sample, as the discriminative ones do, are not bound
# by the formula: over a batch, their gradient has all D directions.
#
# The rank does not say how much a direction is used. With small logits all groups predict the same,
# and their gradient is that of softmax, whatever its rank. On the right is the share of the squared
# gradient in directions that softmax lacks. It grows with the logits.

num_classes, largest = 10, 64
names = {
    "softmax": (1, None),
    "2 groups of neighbours": (2, jaxloss.contiguous_groups),
    "4 groups of neighbours": (4, jaxloss.contiguous_groups),
    "4 discriminative groups": (4, None),
}
labels = jnp.arange(512) % num_classes
features = jnp.asarray(rng.normal(size=(512, largest)))
directions = jnp.asarray(rng.normal(size=(largest, num_classes)))


@jax.jit
def gradients(features, weights):
    """The gradient of the features for each loss."""
    found = {}
    for name, (num_groups, grouping) in names.items():
        groups = grouping and grouping(*features.shape, num_groups)
        loss = partial(jaxloss.group_softmax_loss, num_groups=num_groups, groups=groups)
        found[name] = jax.grad(loss)(features, labels, weights)
    return found


dims = (4, 8, 12, 16, 24, 32, 48, largest)
ranks = {name: [] for name in names}
for dim in dims:
    for name, gradient in gradients(features[:, :dim], directions[:dim] / dim**0.5).items():
        ranks[name].append(np.linalg.matrix_rank(np.asarray(gradient)))

sizes = np.geomspace(0.1, 10, 13)  # Standard deviations of the logits.
lacking = np.linalg.svd(directions - directions.mean(axis=1, keepdims=True))[0][:, num_classes - 1 :]
shares = {name: [] for name in names}
for size in sizes:
    for name, gradient in gradients(features, size * directions / largest**0.5).items():
        outside = np.sum((np.asarray(gradient) @ lacking) ** 2) / np.sum(gradient**2)
        shares[name].append(100 * outside)

figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.2))
every = np.arange(1, largest + 1)
for (name, (num_groups, _)), style in zip(names.items(), ("ko", "C0s", "C2^", "C1D"), strict=True):
    bound = largest if name == "4 discriminative groups" else num_groups * (num_classes - 1)
    axes[0].plot(every, np.minimum(every, bound), style[:-1], linewidth=1.2)
    axes[0].plot(dims, ranks[name], style, markersize=5)
    axes[1].plot(sizes, shares[name], style + "-", markersize=4, linewidth=1.2, label=name)
axes[0].set_title("Rank of the gradient")
axes[0].set(xlabel="number D of features", ylabel="directions", xticks=range(0, 65, 16))
axes[0].set(yticks=[9, 18, 36, 64])
axes[1].set_title("Gradient where softmax has none")
axes[1].set(xlabel="standard deviation of the logits", ylabel="share of its square (%)")
axes[1].set(xscale="log", xticks=(0.1, 1, 10), xticklabels=("0.1", "1", "10"))
figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=2)
figure.suptitle(f"Directions in which {num_classes} classes move the features")
plt.show()
