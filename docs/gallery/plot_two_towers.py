"""
Two towers: a matrix that becomes a diagonal
============================================

Two towers embed pairs, such as images and captions. Entry (i, j) of the matrix of cosines compares
query i with key j. Both losses raise its diagonal and lower the rest: InfoNCE by a softmax over
each row and column, SigLIP by a yes or no for each entry.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxloss

# %%
# Sixteen pairs, with a linear tower for each side. The inputs of a pair share a part and have noise
# of their own. InfoNCE learns log(1/T), and SigLIP its scale and its bias.

rng = np.random.default_rng(0)
shared = rng.normal(size=(16, 12))
images = jnp.asarray(np.concatenate([shared, rng.normal(size=(16, 8))], axis=1))
texts = jnp.asarray(np.concatenate([rng.normal(size=(16, 8)), shared], axis=1))
towers = tuple(jnp.asarray(0.2 * rng.normal(size=(20, 8))) for _ in range(2))


def info_nce(queries, keys, numbers):
    """InfoNCE with a temperature that is learned."""
    return jaxloss.info_nce_loss(queries, keys, temperature=jnp.exp(-numbers[0]))


def siglip(queries, keys, numbers):
    """SigLIP with a scale and a bias that are learned."""
    scale, bias = jnp.exp(numbers[0]), numbers[1]
    return jaxloss.sigmoid_contrastive_loss(queries, keys, scale=scale, bias=bias)


losses = {
    "InfoNCE": (info_nce, jnp.log(jnp.array([5.0, 1.0]))),
    "SigLIP": (siglip, jnp.array([jnp.log(5.0), -5.0])),
}


def train(loss, numbers, num_steps=300, rate=0.05):
    """Returns the cosines before each step, [steps, 16, 16]."""

    def value(parameters):
        (query_tower, key_tower), numbers = parameters
        return loss(images @ query_tower, texts @ key_tower, numbers)

    @jax.jit
    def run(parameters):
        def step(parameters, _):
            query_tower, key_tower = parameters[0]
            cosines = jaxloss.cosine_logits(images @ query_tower, (texts @ key_tower).T)
            gradient = jax.grad(value)(parameters)
            updated = jax.tree.map(lambda x, g: x - rate * g, parameters, gradient)
            return updated, cosines

        return jax.lax.scan(step, parameters, length=num_steps + 1)[1]

    return np.asarray(run((towers, numbers)))


runs = {name: train(*arguments) for name, arguments in losses.items()}

# %%
figure, axes = plt.subplots(2, 4, figsize=(7.5, 4.2), sharex=True, sharey=True)
for row, (name, cosines) in zip(axes, runs.items(), strict=True):
    for axis, number in zip(row, (0, 10, 50, 300), strict=True):
        image = axis.imshow(cosines[number], vmin=-1, vmax=1, cmap="cividis")
        axis.set_title(f"{name}, step {number}", fontsize=9)
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    row[0].set_ylabel("query")
for axis in axes[1]:
    axis.set_xlabel("key")
figure.colorbar(image, ax=axes, shrink=0.8, label="cosine")
figure.suptitle("The cosines of all queries and keys become a diagonal")
plt.show()

# %%
# The same runs in numbers. InfoNCE compares a pair with its rivals of the same row and column.
# SigLIP compares every cosine with one threshold, −bias / scale.

figure, axes = plt.subplots(1, 2, figsize=(7.5, 2.9), sharey=True)
diagonal = np.eye(16, dtype=bool)
for axis, (name, cosines) in zip(axes, runs.items(), strict=True):
    for mask, label, color in ((diagonal, "pairs", "C0"), (~diagonal, "others", "C1")):
        values = cosines[:, mask]
        low, high = np.quantile(values, (0.1, 0.9), axis=1)
        axis.fill_between(range(301), low, high, color=color, alpha=0.2, linewidth=0)
        axis.plot(values.mean(axis=1), color=color)
        axis.text(305, values[-1].mean(), label, color=color, va="center")
    axis.set_title(name)
    axis.set(xlabel="step", xlim=(0, 300), ylim=(-1, 1))
axes[0].set_ylabel("cosine: mean, 10 % to 90 %")
figure.suptitle("Cosines of pairs and of all others during training")
plt.show()
