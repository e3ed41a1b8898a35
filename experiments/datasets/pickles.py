"""Pickles and MATLAB files of others, read without running code of theirs."""

from __future__ import annotations

import io
import pickle
import re
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import IO, Any

import numpy as np

from experiments.core.storage import regular
from experiments.datasets.archives import UnsafeArchiveError, brief, names_file


class _Type:
    """The data type of an array: only of plain numbers and strings, whatever its state says."""

    def __init__(self, name: Any, align: object = False, copy: object = True):
        if not re.fullmatch(r"[|<>=]?[biufcSU]\d{1,9}", str(name)):
            raise UnsafeArchiveError(f"contains an array of the unsupported type {brief(name)}")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any, /) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


def _plain(dtype: Any) -> np.dtype:
    if not isinstance(dtype, _Type):
        raise UnsafeArchiveError(f"contains an array of the unsupported type {brief(dtype)}")
    return dtype.dtype


class _Array(np.ndarray):
    """An array of a pickle, which gets its content after it is created."""

    def __setstate__(self, state: Any, /) -> None:
        *_, shape, dtype, fortran, raw = state
        super().__setstate__((1, shape, _plain(dtype), fortran, raw))


def _reconstruct(subtype: object, shape: object, typecode: object) -> _Array:
    return _Array(0, np.uint8)


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any = "C") -> np.ndarray:
    return np.frombuffer(buffer, _plain(dtype)).reshape(shape, order=order)


def _scalar(dtype: Any, raw: Any) -> Any:
    return _from_buffer(raw.encode("latin1") if isinstance(raw, str) else raw, dtype, ())[()]


def _latin1(text: str = "", encoding: str = "latin1") -> bytes:
    """Bytes, as Python 3 writes them with protocols 0 to 2."""
    return text.encode("latin1")


# NumPy's own functions would believe any data type, and thus take bytes for objects.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): "ndarray",  # Only named.
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _latin1,
    ("builtins", "bytes"): _latin1,
    ("__builtin__", "bytes"): _latin1,
    ("collections", "OrderedDict"): OrderedDict,
}
for _core in ("core", "_core"):
    _ALLOWED[f"numpy.{_core}.multiarray", "_reconstruct"] = _reconstruct
    _ALLOWED[f"numpy.{_core}.multiarray", "scalar"] = _scalar
    _ALLOWED[f"numpy.{_core}.numeric", "_frombuffer"] = _from_buffer


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise UnsafeArchiveError(f"requests {module[:80]}.{name[:80]}") from None


def _unpickle(file: IO[bytes], source: Path) -> Any:
    try:
        return _Unpickler(file, encoding="latin1").load()
    except UnsafeArchiveError as error:
        raise UnsafeArchiveError(
            f"{source} {error}. Only arrays, numbers, strings and containers are read from a "
            "pickle. No code of the file was run."
        ) from None


@names_file
def load_pickle(path: Path, *names: str) -> Any:
    """Reads arrays, numbers, strings and containers; an `UnsafeArchiveError` names anything else.

    `names` are entries that it must have. Strings of Python 2 have one character per byte.
    """
    with regular(path).open("rb") as file:
        return _with_entries(_unpickle(file, path), names)


@names_file
def load_torch_list(path: Path) -> list[int]:
    """Reads a list written by `torch.save`, in its zip format or the older one."""
    with regular(path).open("rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                (name,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
                return [*map(int, _unpickle(io.BytesIO(archive.read(name)), path))]
        file.seek(0)
        # A magic number, the protocol, system information, the object.
        return [*map(int, [_unpickle(file, path) for _ in range(4)][-1])]


@names_file
def load_mat(path: Path, *names: str) -> dict[str, Any]:
    """Reads variables from a MATLAB file (versions 4 to 7.2), without axes of length one.

    In a process of its own: a changed byte can end the process that reads it.
    """
    command = [sys.executable, "-c", _LOAD_MAT, regular(path), *names]
    found = subprocess.run(command, capture_output=True, check=False)
    if found.returncode:
        last = found.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(last or f"its reader ended with status {found.returncode}")
    return _with_entries(pickle.loads(found.stdout), names)


_LOAD_MAT = """
import pickle, sys
from scipy.io import loadmat
path, *names = sys.argv[1:]
content = loadmat(path, appendmat=False, simplify_cells=True, variable_names=names)
pickle.dump(content, sys.stdout.buffer)
"""


def _with_entries(content: Any, names: tuple[str, ...]) -> Any:
    if absent := [name for name in names if name not in content]:
        raise ValueError(f"it has no entry {', '.join(absent)}")
    return content
