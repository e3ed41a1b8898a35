"""
Two views: correlations that become an identity
===============================================

Barlow Twins and VICReg compare two views of each sample, without labels and without negatives. They
keep the features from collapsing by what they ask of the dimensions: equal ones are equal in both
views, and different ones are not correlated.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import jaxloss

# %%
# A linear encoder of 64 samples. A view is a sample with noise. The matrices show the correlation
# of each feature of the first view with each of the second one, as the encoder is trained.

rng = np.random.default_rng(0)
samples = rng.normal(size=(64, 12)) @ rng.normal(size=(12, 12))
views = [jnp.asarray(samples + 0.5 * rng.normal(size=samples.shape)) for _ in range(2)]
mixed = rng.normal(size=(12, 2)) @ rng.normal(size=(2, 10)) + 0.3 * rng.normal(size=(12, 10))
encoder = jnp.asarray(0.05 * mixed)
losses = {
    "Barlow Twins": jaxloss.barlow_twins_loss,
    "VICReg": jaxloss.vicreg_loss,
}


def train(loss, num_steps=400, rate=0.02):
    """Returns both views' features before each step, [steps, 2, samples, features]."""

    def value(encoder):
        return loss(*(view @ encoder for view in views))

    def step(carry, _):
        encoder, velocity = carry
        gradient = jax.grad(value)(encoder)
        gradient = gradient / (jnp.linalg.norm(gradient) + 1e-6)
        velocity = 0.8 * velocity - rate * gradient
        return (encoder + velocity, velocity), jnp.stack([view @ encoder for view in views])

    start = (encoder, jnp.zeros_like(encoder))
    return np.asarray(jax.jit(lambda c: jax.lax.scan(step, c, length=num_steps + 1)[1])(start))


figure, axes = plt.subplots(2, 4, figsize=(7.5, 4.2), sharex=True, sharey=True)
for row, (name, loss) in zip(axes, losses.items(), strict=True):
    history = train(loss)
    for axis, number in zip(row, (0, 20, 100, 400), strict=True):
        correlation = np.corrcoef(*history[number], rowvar=False)[:10, 10:]
        image = axis.imshow(correlation, vmin=-1, vmax=1, cmap="RdBu")
        axis.set_title(f"Step {number}")
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    row[0].set_ylabel(f"{name}\nfeature, view 1")
for axis in axes[1]:
    axis.set_xlabel("feature, view 2")
figure.colorbar(image, ax=axes, shrink=0.8, label="correlation")
figure.suptitle("Correlations of the features of two views, under Barlow Twins and VICReg")
plt.show()
