"""
Weight of a pair against its similarity
=======================================

The gradient of the InfoNCE loss for the similarity of one negative, at three temperatures.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

similarities = jnp.linspace(-1, 1, 101)
for temperature in (0.05, 0.1, 0.5):
    loss = lambda s: jnp.logaddexp(0.0, (s - 0.5) / temperature)
    plt.plot(similarities, jax.vmap(jax.grad(loss))(similarities), label=f"T = {temperature}")
plt.xlabel("similarity of a negative")
plt.ylabel("gradient")
plt.legend()
plt.show()
