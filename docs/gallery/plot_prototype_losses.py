"""
Prototype losses: two ways to pull a feature
============================================

Both losses of fixed prototypes pull a feature towards the direction of its own prototype, and do
not push it from the others. They differ in where a step leads, and in what the length of a feature
or of a prototype does.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxloss

# %%
# The loss of cosines turns a feature around the origin: its step is at a right angle to the
# feature, and shorter for a long feature. The dot-regression loss always steps in the direction of
# the prototype, by an amount that only the angle decides.

prototype = jnp.array([[0.0], [1.0]])
grid = np.linspace(-2, 2, 11)
features = np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
features = jnp.asarray(features[np.linalg.norm(features, axis=1) > 0.6])
losses = {
    "Squared cosine distance": jaxloss.prototype_loss,
    "Dot regression": jaxloss.dot_regression_loss,
}


def steps(loss, features):
    """Returns the steps of features with label 0."""
    labels = jnp.zeros(len(features), jnp.int32)
    return -np.asarray(
        jax.jit(jax.grad(lambda x: loss(x, labels, prototype, reduction="sum")))(features)
    )


figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.7))
for axis, (name, loss) in zip(axes, losses.items(), strict=True):
    arrows = np.asarray(steps(loss, features))
    axis.add_patch(plt.Circle((0, 0), 1, fill=False, color="0.8"))
    style = {"angles": "xy", "scale_units": "xy", "scale": 6, "width": 0.006, "color": "C0"}
    axis.quiver(*features.T, *arrows.T, **style)
    axis.annotate(
        "", (0, 1.0), (0, 0), arrowprops={"arrowstyle": "-|>", "color": "C1", "linewidth": 2}
    )
    axis.set_title(name)
    axis.set(aspect="equal", xticks=[], yticks=[], xlim=(-2.3, 2.3), ylim=(-2.3, 2.5))
    axis.spines[:].set_visible(False)
figure.suptitle("Steps of features (blue) towards their prototype (orange)")
plt.show()

# %%
# With classes of 48, 12 and 3 samples, the mean of the losses is mostly that of the first class.
# Longer prototypes for rare classes, from ``class_balanced_lengths``, give the classes about the
# same pull.

sizes = np.array([48, 12, 3])
labels = jnp.asarray(np.repeat(np.arange(3), sizes))
rng = np.random.default_rng(0)
batch = jnp.asarray(rng.normal(size=(63, 8)))
prototypes = jaxloss.simplex_prototypes(3, 8)
balanced = jaxloss.class_balanced_lengths(labels, 3)

figure, axis = plt.subplots(figsize=(5.5, 2.8))
for k, (name, lengths) in enumerate({"equal lengths": None, "balanced lengths": balanced}.items()):

    def value(x, lengths=lengths):
        """Returns the mean loss."""
        return jaxloss.dot_regression_loss(x, labels, prototypes, lengths=lengths)

    pulls = np.linalg.norm(jax.jit(jax.grad(value))(batch), axis=1)
    shares = np.bincount(np.asarray(labels), pulls) / pulls.sum()
    axis.bar(np.arange(3) + 0.38 * (k - 0.5), shares, 0.36, label=name, color=f"C{k}")
axis.set(xticks=range(3), ylim=(0, 1), ylabel="share of the gradient")
axis.set_xticklabels([f"class {c + 1}\n{n} samples" for c, n in enumerate(sizes)])
axis.legend()
figure.suptitle("Dot regression: each class's share of the gradient")
plt.show()
