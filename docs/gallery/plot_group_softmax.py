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
# For every sample and every grouping, softmax loss ≤ tight bound ≤ loose bound:
# Proposition 1 of the paper. A sample that softmax is done with still has a large loss here, since
# its weakest group alone would be wrong. On the right, features and classifier descend the loose
# bound together, and the order holds in every step.

losses = {"loose bound": (3, "loose"), "tight bound": (3, "tight")}
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
# paper's supplement, which bounds its rank by that of W, min(C, D). The numbers of
# :math:`p - e_y` sum to 0, so that it is at most min(C − 1, D). Group softmax has such a
# gradient for each group of features, eq. (B.2). With the same G groups for all samples, these are
# min(G (C − 1), D) directions, within the supplement's min(G C, D). On the left, lines are these
# formulas, and markers the rank of the gradient of 512 samples. Discriminative groups differ from
# sample to sample: the formula holds for the grouping of one sample, and over a batch the gradient
# has all D directions.
#
# The rank does not say how much a direction is used. With small logits all groups predict the same,
# and their gradient is nearly that of softmax. On the right is the share of the squared gradient in
# directions that softmax lacks. It grows with the logits.

num_classes, largest = 10, 64
labels = jnp.arange(512) % num_classes
features = jnp.asarray(rng.normal(size=(512, largest)))
weights = jnp.asarray(rng.normal(size=(largest, num_classes)))
discriminative_groups = jax.jit(jaxloss.discriminative_groups, static_argnums=3)
names = ["softmax", "2 groups of neighbours", "4 groups of neighbours", "4 discriminative groups"]


@jax.jit
def gradient(features, weights, groups):
    """The gradient of the features. Of four groups, those without features have none."""
    loss = partial(jaxloss.group_softmax_loss, num_groups=4)
    return jax.grad(loss)(features, labels, weights, groups=groups)


def gradients(features, weights):
    """The gradients of the four losses, [4, n, D]."""
    groups = [jaxloss.contiguous_groups(512, features.shape[1], number) for number in (1, 2, 4)]
    groups.append(discriminative_groups(features, labels, weights, 4))
    return np.stack([gradient(features, weights, each) for each in groups])


dims = (8, 16, 32, 48, largest)
ranks = [
    np.linalg.matrix_rank(gradients(features[:, :dim], weights[:dim] / dim**0.5)) for dim in dims
]
sizes = np.geomspace(0.1, 10, 13)  # Standard deviations of the logits.
differences = weights - weights.mean(axis=1, keepdims=True)
lacking = np.linalg.svd(differences)[0][:, num_classes - 1 :]
shares = []
for size in sizes:
    found = gradients(features, size * weights / largest**0.5)
    outside = np.sum((found @ lacking) ** 2, axis=(1, 2))
    shares.append(100 * outside / np.sum(found**2, axis=(1, 2)))

figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.2))
every, most = np.arange(1, largest + 1), [9, 18, 36, largest]
for k, style in enumerate(("ko", "C0s", "C2^", "C1D")):
    axes[0].plot(every, np.minimum(every, most[k]), style[:-1], linewidth=1.2)
    axes[0].plot(dims, [rank[k] for rank in ranks], style, markersize=5)
    share = [each[k] for each in shares]
    axes[1].plot(sizes, share, style + "-", markersize=4, linewidth=1.2, label=names[k])
axes[0].set_title("Rank of the gradient")
axes[0].set(
    xlabel="number D of features", ylabel="directions", xticks=range(0, 65, 16), yticks=most
)
axes[1].set_title("Gradient where softmax has none")
axes[1].set(xlabel="standard deviation of the logits", ylabel="share of its square (%)")
axes[1].set(xscale="log", xticks=(0.1, 1, 10), xticklabels=("0.1", "1", "10"))
figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=2)
figure.suptitle(f"Directions in which {num_classes} classes move the features")
plt.show()
