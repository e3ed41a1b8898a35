"""
Multi-label losses: rows, columns and easy negatives
====================================================

A sample has several classes. The two-way loss ranks the classes of a sample, a row of the logits,
and the samples of a class, a column. The asymmetric loss (ASL) looks at one logit at a time, and
ignores negatives that are easy.
"""

from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxloss

# %%
# Eight samples and six classes. A plus marks a label, a question mark an unknown one, which has no
# effect. The second and third matrix are steps down the gradients of the two parts of the two-way
# loss: blue logits rise, and red ones fall. Each row of the sample-wise part sums to zero, and each
# column of the class-wise part: they compare logits and do not move them all.

rng = np.random.default_rng(6)
targets = (rng.uniform(size=(8, 6)) < 0.3).astype(np.int32)
targets[:, 5] = [0, 0, 1, 0, 0, 0, 1, 0]
targets[1, 2] = targets[6, 4] = targets[4, 0] = -1
logits = jnp.asarray(1.5 * (targets > 0) + rng.normal(0, 1.2, (8, 6)) - 0.5)

parts = {
    "Sample-wise: rows": jaxloss.sample_wise_loss,
    "Class-wise: columns": jaxloss.class_wise_loss,
}
steps = {
    name: -np.asarray(jax.jit(jax.grad(partial(loss, reduction="sum")))(logits, targets))
    for name, loss in parts.items()
}


def draw_matrix(axis, values, **colors):
    """Draws a matrix of samples and classes, with the marks of the targets."""
    for (i, c), target in np.ndenumerate(targets):
        mark = {1: "+", 0: "", -1: "?"}[int(target)]
        axis.text(c, i, mark, ha="center", va="center", fontsize=11, color="black")
    axis.set(xticks=range(6), xticklabels=range(1, 7), yticks=range(8), yticklabels=range(1, 9))
    axis.set_xticks(np.arange(7) - 0.5, minor=True)
    axis.set_yticks(np.arange(9) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1.5)
    axis.tick_params(which="both", length=0)
    axis.spines[:].set_visible(False)
    return axis.imshow(values, **colors)


figure, axes = plt.subplots(1, 3, figsize=(7.5, 3.4), sharey=True)
draw_matrix(axes[0], logits, cmap="Greys", vmin=-3, vmax=6)
axes[0].set_title("Logits and labels")
axes[0].set(xlabel="class", ylabel="sample")
limit = max(np.abs(step).max() for step in steps.values())
for axis, (name, step) in zip(axes[1:], steps.items(), strict=True):
    image = draw_matrix(axis, step, cmap="RdBu", vmin=-limit, vmax=limit)
    axis.set_title(name)
    axis.set(xlabel="class")
lines = {"color": "C4", "linewidth": 1.6}
axes[1].add_patch(plt.Rectangle((-0.5, 2.5), 6, 1, fill=False, **lines))
axes[2].add_patch(plt.Rectangle((1.5, -0.5), 1, 8, fill=False, **lines))
figure.colorbar(image, ax=axes, shrink=0.9, label="step of the logit")
figure.suptitle("Two-way loss: each label is compared within its row and within its column")
plt.show()

# %%
# The steps of six losses on the same logits. The sigmoid loss moves every known logit, and the
# asymmetric loss leaves easy negatives alone. The robust loss and WARP compare labels and negatives
# of a sample by hinges: a label that is ahead by a margin does not move. Softmax wants equal shares
# for the labels of a sample, and lowers one that has more.

others = {
    "Sigmoid": jaxloss.sigmoid_loss,
    "Asymmetric": jaxloss.asymmetric_loss,
    "Robust": jaxloss.robust_multilabel_loss,
    "Softmax": jaxloss.multilabel_softmax_loss,
    "WARP": jaxloss.warp_loss,
    "Two-way": jaxloss.two_way_loss,
}
figure, axes = plt.subplots(2, 3, figsize=(6.4, 5.5), sharex=True, sharey=True)
for axis, (name, loss) in zip(axes.flat, others.items(), strict=True):
    step = -np.asarray(jax.jit(jax.grad(partial(loss, reduction="sum")))(logits, targets))
    limit = np.abs(step).max()
    draw_matrix(axis, step, cmap="RdBu", vmin=-limit, vmax=limit)
    axis.set_title(name)
for axis in axes[:, 0]:
    axis.set_ylabel("sample")
for axis in axes[1]:
    axis.set_xlabel("class")
figure.suptitle("Steps of six multi-label losses, each relative to its largest one")
plt.show()

# %%
# The asymmetric loss of one negative. Focus γ₋ lowers the loss of negatives with a low
# probability, and the clip m removes it. Above a probability of about 0.9, the gradient falls
# again: such a negative may be a label that is missing.

line = jnp.linspace(-5, 6, 221)
probabilities = np.asarray(jax.nn.sigmoid(line))
options = {
    "γ₋ = 0, m = 0 (sigmoid)": {"negative_focus": 0.0, "clip": 0.0},
    "γ₋ = 2, m = 0": {"negative_focus": 2.0, "clip": 0.0},
    "γ₋ = 4, m = 0.05": {"negative_focus": 4.0, "clip": 0.05},
    "γ₋ = 4, m = 0.2": {"negative_focus": 4.0, "clip": 0.2},
}


def loss_and_gradient(**option):
    """Returns the loss of a single negative, and its derivative, for each logit."""

    def loss(logit):
        return jaxloss.asymmetric_loss(logit[None, None], jnp.zeros((1, 1), jnp.int32), **option)

    return jax.jit(jax.vmap(jax.value_and_grad(loss)))(line)


figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.1))
for (name, option), style in zip(options.items(), ("-", "--", ":", "-."), strict=True):
    for axis, curve in zip(axes, loss_and_gradient(**option), strict=True):
        axis.plot(probabilities, curve, style, label=name)
axes[0].set_title("Loss")
axes[0].set(ylabel="loss of a negative", ylim=(0, 4))
axes[1].set_title("Gradient")
axes[1].set(ylabel="derivative by the logit", ylim=(0, 1.2))
for axis in axes:
    axis.set(xlabel="probability of the class", xlim=(0, 1))
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
figure.suptitle("Asymmetric loss: easy negatives have no weight")
plt.show()
