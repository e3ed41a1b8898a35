"""
Weight of a pair against its similarity
=======================================

The gradient of the InfoNCE loss for the similarity of one negative, at three temperatures.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import jaxloss

angles = jnp.linspace(0, jnp.pi, 91)
partner = jnp.array([[1.0, 0.0]])


def gradient(angle, temperature):
    """The gradient of the loss for the cosine of a negative key at this angle."""
    negative = jnp.array([[jnp.cos(angle), jnp.sin(angle)]])

    def loss(scale):
        keys = jnp.concatenate([0.5 * partner, scale * negative])
        options = {"temperature": temperature, "symmetric": False, "normalize": False}
        return jaxloss.info_nce_loss(partner, keys, **options)

    return jax.grad(loss)(1.0)


for temperature in (0.05, 0.1, 0.5):
    gradients = [gradient(angle, temperature) for angle in angles[::10]]
    plt.plot(jnp.cos(angles[::10]), gradients, label=f"T = {temperature}")
plt.xlabel("similarity of a negative")
plt.ylabel("gradient")
plt.legend()
plt.show()
