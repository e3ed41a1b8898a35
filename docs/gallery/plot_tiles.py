"""
Tiles and devices: who computes which pairs
===========================================

A pairwise loss of n samples compares n × n pairs. It never holds the whole matrix: it visits tiles,
keeps a few numbers per sample, and forgets the tile. On several devices, each one compares its own
samples with all others.
"""

from functools import partial

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxloss

# %%
# A row of the matrix is an anchor, and a column a reference. On one device, a tile below the
# diagonal serves both of its sides: only ten of these sixteen tiles are computed, in the order of
# the numbers, and a grey number shows which tile is used again.
#
# On four devices, each device has the rows of its colour. References of up to 16 MiB are gathered,
# and a device visits its tiles. Larger ones go around a ring: the numbers are the turns, and in
# each turn a device sees the block of the neighbour that it has just received.

size = 4
order = np.zeros((size, size), int)
order[np.diag_indices(size)] = np.arange(size) + 1
order[np.tril_indices(size, -1)] = np.arange(size + 1, 11)
row, column = np.indices((size, size))
panels = {
    "One device": (0 * row, np.maximum(order, order.T), row >= column),
    "Four devices, gathered": (row, None, row >= 0),
    "Four devices, ring": (row, (row - column) % size + 1, row >= 0),
}

figure, axes = plt.subplots(1, 3, figsize=(7.5, 3.1))
for axis, (title, (device, number, computed)) in zip(axes, panels.items(), strict=True):
    for i, j in np.ndindex(size, size):
        fill = {"color": f"C{device[i, j]}", "alpha": 0.35} if computed[i, j] else {"color": "0.95"}
        axis.add_patch(plt.Rectangle((j + 0.04, i + 0.04), 0.92, 0.92, linewidth=0, **fill))
        if number is not None:
            color = "black" if computed[i, j] else "0.55"
            axis.text(j + 0.5, i + 0.5, number[i, j], ha="center", va="center", color=color)
    axis.set_title(title)
    axis.set(xlim=(0, size), ylim=(size, 0), aspect="equal", xlabel="references")
    axis.set(xticks=[], yticks=np.arange(size) + 0.5, yticklabels=[])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
axes[0].set_ylabel("anchors")
for axis in axes[1:]:
    axis.set_yticklabels([f"device {k + 1}" for k in range(size)], rotation=90, va="center")
figure.suptitle("Which tiles of the n × n matrix are computed, and where")
plt.show()

# %%
# What tiles save, as the compiler reports it: the temporary memory of the gradient of NCA. With a
# single tile, which ``block_size=n`` gives, it grows with n². With tiles of the default size,
# sixteen times the samples need hardly more.

count = jax.device_count()
mesh = jax.make_mesh((count,), ("batch",), axis_types=(AxisType.Explicit,))
split = NamedSharding(mesh, PartitionSpec("batch"))


def mebibytes(n, sharding=None, **options):
    """Returns the temporary memory per device of a compiled gradient, in MiB."""
    loss = partial(jaxloss.nca_loss, temperature=16.0, **options)
    features = jax.ShapeDtypeStruct((n, 64), jnp.float32, sharding=sharding)
    labels = jax.ShapeDtypeStruct((n,), jnp.int32, sharding=sharding)
    compiled = jax.jit(jax.grad(loss)).lower(features, labels).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


numbers = np.array([1024, 4096, 16384])
curves = {
    "one tile, n × n": [mebibytes(n, block_size=n) for n in numbers.tolist()],
    f"tiles, {count} devices, each": [mebibytes(n, split) for n in numbers.tolist()],
    "tiles, one device": [mebibytes(n) for n in numbers.tolist()],
}

figure, axis = plt.subplots(figsize=(6.5, 3.2))
for (name, curve), marker in zip(curves.items(), "so^", strict=True):
    axis.loglog(numbers, curve, marker + "-", markersize=5, label=name)
axis.set(xlabel="samples n, of 64 features", ylabel="temporary memory, MiB")
axis.set_xticks(numbers, [f"{n:,}" for n in numbers], minor=False)
axis.set_xticks([], minor=True)
axis.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
axis.grid(axis="y")
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
figure.suptitle("Memory of the gradient against the number of samples")
plt.show()
