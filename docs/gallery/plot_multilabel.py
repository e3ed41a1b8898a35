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

figure, axes = plt.subplots(1, 3, figsize=(7.5, 3.4), sharey=True)
axes[0].imshow(logits, cmap="Greys", vmin=-3, vmax=6)
axes[0].set_title("Logits and labels")
axes[0].set(ylabel="sample", yticks=range(8), yticklabels=range(1, 9))
limit = max(np.abs(step).max() for step in steps.values())
for axis, (name, step) in zip(axes[1:], steps.items(), strict=True):
    image = axis.imshow(step, cmap="RdBu", vmin=-limit, vmax=limit)
    axis.set_title(name)
for axis in axes:
    for (i, c), target in np.ndenumerate(targets):
        mark = {1: "+", 0: "", -1: "?"}[int(target)]
        axis.text(c, i, mark, ha="center", va="center", fontsize=11, color="black")
    axis.set(xlabel="class", xticks=range(6), xticklabels=range(1, 7))
    axis.set_xticks(np.arange(7) - 0.5, minor=True)
    axis.set_yticks(np.arange(9) - 0.5, minor=True)
    axis.grid(which="minor", color="white", linewidth=1.5)
    axis.tick_params(which="both", length=0)
    axis.spines[:].set_visible(False)
lines = {"color": "C4", "linewidth": 1.6}
axes[1].add_patch(plt.Rectangle((-0.5, 2.5), 6, 1, fill=False, **lines))
axes[2].add_patch(plt.Rectangle((1.5, -0.5), 1, 8, fill=False, **lines))
figure.colorbar(image, ax=axes, shrink=0.9, label="step of the logit")
figure.suptitle("Two-way loss: each label is compared within its row and within its column")
plt.show()

# %%
# The asymmetric loss of one negative. Focus γ₋ lowers the loss of negatives with a low
# probability, and the clip m removes it. Above a probability of about 0.9, the gradient falls
# again: such a negative may be a label that is missing.

logits = jnp.linspace(-5, 6, 221)
probabilities = np.asarray(jax.nn.sigmoid(logits))
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

    return jax.jit(jax.vmap(jax.value_and_grad(loss)))(logits)


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
