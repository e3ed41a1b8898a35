"""Prototypes on the sphere, computed once and cached on disk."""

from __future__ import annotations

import contextlib
import io
import zipfile
from pathlib import Path

import jax
import numpy as np

import jaxloss
from experiments.files import cache_folder, write_atomically
from experiments.processes import on_first


def spread_prototypes(num_prototypes: int, dim: int, seed: int) -> np.ndarray:
    """Unit vectors that are maximally separated: a simplex for M ≤ d + 1, else uniform prototypes.

    Uniform prototypes take up to minutes to compute. They are cached in `jaxloss/prototypes` in the
    user's cache (XDG_CACHE_HOME, by default ~/.cache). With several processes, all of them call
    this, and the first one computes or reads the prototypes for all: those of two hosts may differ
    in the last bits.

    Args:
        num_prototypes: M.
        dim: d.
        seed: Seed of uniform prototypes.

    Returns:
        float32 [d, M].
    """
    return on_first(lambda: _spread(num_prototypes, dim, seed))


def _spread(num_prototypes: int, dim: int, seed: int) -> np.ndarray:
    if num_prototypes <= dim + 1:
        return np.asarray(jaxloss.simplex_prototypes(num_prototypes, dim))
    path = prototypes_file(num_prototypes, dim, seed)
    stored = _read(path, (dim, num_prototypes))
    if stored is not None:
        return stored
    made = np.asarray(jaxloss.uniform_prototypes(jax.random.key(seed), num_prototypes, dim))
    content = io.BytesIO()
    np.savez(content, prototypes=made)
    # Without a writable cache, every run computes them.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.getvalue())
    return made


def prototypes_file(num_prototypes: int, dim: int, seed: int) -> Path:
    """The cache file of uniform prototypes."""
    name = f"uniform-{num_prototypes}x{dim}-seed{seed}-jaxloss{jaxloss.__version__}.npz"
    return cache_folder("prototypes") / name


def _read(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """The prototypes in a file, which has a checksum; None if it is missing or damaged."""
    try:
        with np.load(path) as stored:
            prototypes = stored["prototypes"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    fits = prototypes.shape == shape and prototypes.dtype == np.float32
    return prototypes if fits else None
