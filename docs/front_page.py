"""Prints the numbers of the README: memory beside a naive form, and the same loss on four devices.

    python docs/front_page.py
"""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxloss


def unit(rows):
    return rows / jnp.linalg.norm(rows, axis=1, keepdims=True)


def naive_supcon(features, labels):
    """As it is usually written: all pairs at once."""
    logits = unit(features) @ unit(features).T / 0.1
    itself = jnp.eye(len(labels), dtype=bool)
    positive = (labels[:, None] == labels) & ~itself
    log_p = jax.nn.log_softmax(jnp.where(itself, -jnp.inf, logits), axis=1)
    return -jnp.mean(jnp.sum(log_p, axis=1, where=positive) / jnp.sum(positive, axis=1))


def naive_clip(images, texts):
    logits = unit(images) @ unit(texts).T / 0.07
    own = jnp.diagonal(logits)
    sums = sum(jax.nn.logsumexp(logits, axis=axis) for axis in (0, 1))
    return jnp.mean(sums / 2 - own)


def naive_classifier(features, labels, weights):
    log_p = jax.nn.log_softmax(features @ weights)
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], axis=1))


def megabytes(loss, *shapes):
    """The memory of value and gradients, beside these and the arguments."""
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.float32 if len(shape) == 2 else jnp.int32)
        for shape in shapes
    ]
    floats = tuple(i for i, array in enumerate(arrays) if array.dtype == jnp.float32)
    program = jax.jit(jax.value_and_grad(loss, argnums=floats)).lower(*arrays).compile()
    return program.memory_analysis().temp_size_in_bytes / 1e6


def main():
    rows = (8192, 512)
    for name, ours, naive, shapes in (
        ("SupCon, 8,192 rows", jaxloss.supervised_contrastive_loss, naive_supcon, (rows, rows[:1])),
        ("CLIP, 32,768 pairs", jaxloss.info_nce_loss, naive_clip, ((32768, 512),) * 2),
        (
            "softmax, 4,096 rows, 100,000 classes",
            jaxloss.classifier_loss,
            naive_classifier,
            ((4096, 512), (4096,), (512, 100_000)),
        ),
    ):
        of_both = megabytes(ours, *shapes), megabytes(naive, *shapes)
        print(f"{name}: {of_both[0]:,.0f} MB, naive {of_both[1]:,.0f} MB")

    rng = np.random.default_rng(0)
    features, labels = rng.normal(size=(1024, 128)).astype(np.float32), np.arange(1024) % 32
    step = jax.jit(jax.value_and_grad(jaxloss.supervised_contrastive_loss))
    on_one = step(features, labels)
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(AxisType.Explicit,))
    spread = NamedSharding(mesh, PartitionSpec("batch"))
    on_four = step(*jax.device_put((features, labels), spread))
    gap = np.max(np.abs(np.asarray(on_one[1]) - np.asarray(on_four[1])))
    print(f"one device: {on_one[0]:.6f}, four devices: {on_four[0]:.6f},", end=" ")
    print(f"gradients differ by {gap / np.max(np.abs(np.asarray(on_one[1]))):.0e}")


if __name__ == "__main__":
    main()
