"""Prototypes on the sphere, made once and kept on disk."""

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
    """Unit vectors as far apart as they can be: a simplex where there is one, else uniform ones.

    The uniform ones take up to minutes to make. They are kept in `jaxloss/prototypes` in the user's
    cache (XDG_CACHE_HOME, by default ~/.cache), and made again where the file is damaged. Of
    several processes, which all have to call this, the first one makes or reads them for all: what
    two hosts make may differ in the last bits.

    Args:
      num_prototypes: M.
      dim: d.
      seed: seed of the uniform ones; the simplex, for M ≤ d + 1, has none.

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
    # Without a place to keep them they are made in every run.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.getvalue())
    return made


def prototypes_file(num_prototypes: int, dim: int, seed: int) -> Path:
    """Where the uniform prototypes with these parameters are kept."""
    name = f"uniform-{num_prototypes}x{dim}-seed{seed}-jaxloss{jaxloss.__version__}.npz"
    return cache_folder("prototypes") / name


def _read(path: Path, shape: tuple[int, int]) -> np.ndarray | None:
    """The prototypes in a file, whose checksum is tested, or None if there are no such ones."""
    try:
        with np.load(path) as stored:
            prototypes = stored["prototypes"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    fits = prototypes.shape == shape and prototypes.dtype == np.float32
    return prototypes if fits else None
