"""Pickles and MATLAB files of others, read without running code of theirs."""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np

from experiments.core.storage import regular
from experiments.datasets.archives import (
    DamagedArchiveError,
    UnsafeArchiveError,
    brief,
    reading,
    typed,
)

# --- Pickles ------------------------------------------------------------------------------------


class _Array:
    """An array of a pickle, which gets its content after it is created."""

    array: np.ndarray

    def __setstate__(self, state: Any, /) -> None:
        shape, dtype, fortran, raw = state[-4:]
        self.array = _from_buffer(raw, dtype, shape, "F" if fortran is True else "C")


class _Type:
    """The data type of an array; NumPy's own would believe any state."""

    def __init__(self, name: Any, align: object = False, copy: object = True):
        if not isinstance(name, str) or not re.fullmatch(r"[|<>=]?[biufcSU]\d{1,9}", name):
            raise UnsafeArchiveError(f"contains an array of the unsupported type {brief(name)}")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any, /) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


def _raw(content: Any) -> bytes:
    """The bytes of an array or number. Python 2 stored them as a string."""
    if not isinstance(content, bytes | bytearray | str):
        raise UnsafeArchiveError(f"contains an array made from {type(content).__name__}")
    return content.encode("latin1") if isinstance(content, str) else bytes(content)


def _ndarray(*_: object) -> None:
    raise UnsafeArchiveError("calls numpy.ndarray, which pickled arrays do not do")


def _reconstruct(subtype: object, shape: object, typecode: object) -> _Array:
    return _Array()


def _scalar(dtype: Any, raw: Any) -> Any:
    return _from_buffer(raw, dtype, ())[()]


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any = "C") -> np.ndarray:
    if not isinstance(dtype, _Type):
        raise UnsafeArchiveError(f"contains an array of the unsupported type {brief(dtype)}")
    if len(shape) > 32 or not all(type(side) is int for side in shape):
        raise ValueError("the shape of an array is not one")
    raw, count = _raw(buffer), math.prod(shape)
    if count * dtype.dtype.itemsize != len(raw) or (count > 1 and not raw):
        raise ValueError(f"{len(raw)} bytes for an array of the shape {list(shape)}")
    return np.ndarray(shape, dtype.dtype, raw, order=order)


def _latin1(text: str = "", encoding: str = "latin1") -> bytes:
    """Bytes, as Python 3 writes them with protocols 0 to 2."""
    return text.encode("latin1")


_FACTORIES = {kind.__name__: kind for kind in (bool, int, float, complex, str, list, dict, set)}


def _default(factory: Any = None) -> defaultdict:
    return defaultdict(None if factory is None else _FACTORIES[factory])


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _ndarray,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _latin1,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): _default,
}
for _core in ("core", "_core"):
    _ALLOWED[f"numpy.{_core}.multiarray", "_reconstruct"] = _reconstruct
    _ALLOWED[f"numpy.{_core}.multiarray", "scalar"] = _scalar
    _ALLOWED[f"numpy.{_core}.numeric", "_frombuffer"] = _from_buffer
for _builtins in ("builtins", "__builtin__"):
    # Only named, as what a `defaultdict` creates: a call of `str` can take years.
    _ALLOWED |= {(_builtins, name): name for name in _FACTORIES}
    _ALLOWED |= {(_builtins, kind.__name__): kind for kind in (complex, set, frozenset)}
    _ALLOWED[_builtins, "bytes"] = _latin1


class _Tuple(tuple):
    """A tuple of a pickle, which cannot be a key: the hash of nested ones can take years."""

    __hash__ = None  # pyright: ignore


class _Unpickler(pickle._Unpickler):
    """Reads arrays, numbers, strings and containers of these.

    It is that in Python: the one in C allocates what a file states, such as a memo of 30 GB.
    """

    def __init__(self, file: IO[bytes], size: float):
        super().__init__(file, encoding="latin1")
        self.room = 2**26 + 16 * size
        """Bytes that it may still fill, of which one byte of a file can fill hundreds."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise UnsafeArchiveError(f"requests {module[:80]}.{name[:80]}") from None

    def load_build(self) -> None:
        state, built = self.stack.pop(), self.stack[-1]  # pyright: ignore
        if not isinstance(built, _Array | _Type):
            raise UnsafeArchiveError(f"sets the state of {typed(built)}")
        built.__setstate__(state)


def _made(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """Counts what an opcode makes."""

    def made(self: Any) -> None:
        load(self)
        top = self.stack[-1] if self.stack else None
        self.room -= 200 + sys.getsizeof(top) + getattr(getattr(top, "array", None), "nbytes", 0)
        if self.room < 0:
            raise ValueError("it contains far more than its size explains")
        if type(top) is tuple:
            self.stack[-1] = _Tuple(top)

    return made


_MAKERS = b"".join(
    [
        *(pickle.MARK, pickle.EMPTY_DICT, pickle.EMPTY_LIST, pickle.EMPTY_SET, pickle.FROZENSET),
        *(pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.LIST, pickle.DICT),
        *(pickle.REDUCE, pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.OBJ, pickle.INST),
    ]
)
_loads = pickle._Unpickler.dispatch
_Unpickler.dispatch = _loads | {code: _made(_loads[code]) for code in _MAKERS}
_Unpickler.dispatch[pickle.BUILD[0]] = _made(_Unpickler.load_build)


def _plain(value: Any, seen: dict[int, Any]) -> Any:
    """Replaces every `_Array` and `_Tuple` in a value, in lists and dictionaries in place.

    `seen` has the containers that were visited, as a small pickle can refer to one very often.
    """
    if isinstance(value, _Array):
        return value.array
    if isinstance(value, _Type) or callable(value):
        raise UnsafeArchiveError(f"contains {typed(value)}")
    if not isinstance(value, dict | list | tuple):
        return value
    if id(value) not in seen:
        seen[id(value)] = value, value  # The first keeps it alive, and thus its number.
        if isinstance(value, tuple):
            seen[id(value)] = value, tuple(_plain(item, seen) for item in value)
        else:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                value[key] = _plain(item, seen)
    return seen[id(value)][1]


def _unpickle(file: IO[bytes], size: float, source: Path) -> Any:
    try:
        return _plain(_Unpickler(file, size).load(), {})
    except UnsafeArchiveError as error:
        raise UnsafeArchiveError(
            f"{source} {error}. Only arrays, numbers, strings and containers are read from a "
            "pickle. No code of the file was run."
        ) from None


def load_pickle(path: Path) -> Any:
    """Reads arrays, numbers, strings and containers; an `UnsafeArchiveError` names anything else.

    Strings of Python 2 have one character per byte (latin-1). Arrays are read-only.
    """
    with reading(path, "pickle"), open(regular(path), "rb") as file:
        return _unpickle(file, path.stat().st_size, path)


_LONGEST_LIST = 2**24
"""Bytes of a list of categories; that of iNaturalist has a few thousand."""


def load_torch_list(path: Path) -> list:
    """Reads a list written by `torch.save`, in its zip format or the older one."""
    with reading(path, "file of torch.save"), open(regular(path), "rb") as file:
        content = file.read(_LONGEST_LIST + 1)
        pickles = 4  # The old format: a magic number, the protocol, system information, the object.
        if zipfile.is_zipfile(io.BytesIO(content)):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                names = [name for name in archive.namelist() if name.split("/")[-1] == "data.pkl"]
                if len(names) != 1:
                    raise DamagedArchiveError(f"{path} was not written by torch.save")
                with archive.open(names[0]) as member:
                    content, pickles = member.read(_LONGEST_LIST + 1), 1
        if len(content) > _LONGEST_LIST:
            raise DamagedArchiveError(f"{path} is too large for a list of categories")
        stream = io.BytesIO(content)
        *_, value = (_unpickle(stream, len(content), path) for _ in range(pickles))
    if not isinstance(value, list):
        raise DamagedArchiveError(f"{path} contains {typed(value)}, not a list")
    return value


# --- MATLAB -------------------------------------------------------------------------------------

_MATLAB_MEMORY = 2**30
"""Bytes that the reader may take, and eight times the size of the file."""


def load_mat(path: Path, *names: str) -> dict[str, Any]:
    """Reads variables from a MATLAB file (versions 4 to 7.2), without axes of length one.

    In a process of its own, as one changed byte can crash SciPy's reader, or let it allocate any
    amount of memory.
    """
    with reading(path, "MATLAB file"):
        size = regular(path).stat().st_size
        # Isolated, so that no file of the working directory is imported in place of a library.
        libraries = {str(Path(find_spec(name).origin).parents[1]) for name in ("numpy", "scipy")}  # pyright: ignore
        script = Path(__file__).with_name("mat.py")
        limits = str(60 + size // 2**22), str(_MATLAB_MEMORY + 8 * size)
        command = [sys.executable, "-I", script, os.pathsep.join(libraries), *limits, path, *names]
        one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        with subprocess.Popen(
            command,
            env={**os.environ, **one_thread},  # Each thread reserves memory.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                content = _unpickle(process.stdout, math.inf, path)  # pyright: ignore
            except EOFError:
                status = process.wait()
                raise ValueError(f"its reader crashed with the status {status}") from None
            finally:
                process.kill()
        if isinstance(content, str):
            raise DamagedArchiveError(f"{path} is not a readable MATLAB file: {content}")
    missing = [name for name in names if name not in content]
    if missing:
        raise DamagedArchiveError(f"{path} has no variable {', '.join(missing)}")
    return {name: content[name] for name in names}
