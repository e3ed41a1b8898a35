"""Prints the numbers of the README: memory beside a naive form, and the same loss on four devices.

python docs/front_page.py
"""

import os

os.environ |= {"JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxloss


def naive_supcon(features, labels):
    """As it is usually written: all pairs at once."""
    itself = jnp.eye(len(labels), dtype=bool)
    positive = (labels[:, None] == labels) & ~itself
    logits = jnp.where(itself, -jnp.inf, jaxloss.cosine_logits(features, features.T) / 0.1)
    log_p = jax.nn.log_softmax(logits, axis=1)
    return -jnp.mean(jnp.sum(log_p, axis=1, where=positive) / jnp.sum(positive, axis=1))


def naive_clip(images, texts):
    """The same of two towers."""
    logits = jaxloss.cosine_logits(images, texts.T) / 0.07
    sums = sum(jax.nn.logsumexp(logits, axis=axis) for axis in (0, 1))
    return jnp.mean(sums / 2 - jnp.diagonal(logits))


def megabytes(loss, *shapes):
    """The memory of value and gradients, beside these and the arguments."""
    dtypes = [jnp.float32 if len(shape) == 2 else jnp.int32 for shape in shapes]
    floats = tuple(i for i, dtype in enumerate(dtypes) if dtype == jnp.float32)
    arrays = [jax.ShapeDtypeStruct(*array) for array in zip(shapes, dtypes, strict=True)]
    program = jax.jit(jax.value_and_grad(loss, argnums=floats)).lower(*arrays).compile()
    return program.memory_analysis().temp_size_in_bytes / 1e6


supcon, rows = jaxloss.supervised_contrastive_loss, (8192, 512)
for name, ours, naive, *shapes in (
    ("SupCon, 8,192 rows", supcon, naive_supcon, rows, rows[:1]),
    ("CLIP, 32,768 pairs", jaxloss.info_nce_loss, naive_clip, (32768, 512), (32768, 512)),
    (
        *("softmax, 4,096 rows, 100,000 classes", jaxloss.classifier_loss),
        lambda features, labels, weights: jaxloss.softmax_loss(features @ weights, labels),
        *((4096, 512), (4096,), (512, 100_000)),
    ),
):
    print(f"{name}: {megabytes(ours, *shapes):,.0f} MB, naive {megabytes(naive, *shapes):,.0f} MB")

arrays = jr.normal(jr.key(0), (1024, 128)), jnp.arange(1024) % 32
step = jax.jit(jax.value_and_grad(supcon))
mesh = jax.make_mesh((4,), ("batch",), axis_types=(AxisType.Explicit,))
on_one = step(*arrays)
on_four = jax.device_get(step(*jax.device_put(arrays, NamedSharding(mesh, PartitionSpec("batch")))))
gap = jnp.max(jnp.abs(on_one[1] - on_four[1])) / jnp.max(jnp.abs(on_one[1]))
print(f"one device {on_one[0]:.6f}, four devices {on_four[0]:.6f}, gradients differ by {gap:.0e}")
