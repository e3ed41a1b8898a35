"""Safe reading of downloaded files: pickles run no code, archives stay inside their folder.

`pickle` runs code unless its globals are restricted, which is done here. Archives are left to
`zipfile` and to the `data` filter of `tarfile`.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from lzma import LZMAError
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from experiments.errors import ExperimentError
from experiments.storage import regular
from experiments.terminal import one_line


class MissingArchiveError(ExperimentError, FileNotFoundError):
    """Files of a data set are missing. The message lists the files and folders."""


class DamagedArchiveError(ExperimentError, ValueError):
    """A file is unreadable, or its content is not as expected. The message names it."""


class UnsafeArchiveError(ExperimentError, ValueError):
    """A file would run code, write outside its folder, or fill the disk. The message names it."""


# --- Messages -----------------------------------------------------------------------------------


def brief(value: object, limit: int = 80) -> str:
    """A value of a file in a message: its start, or its type where it is no text or number.

    The text of a list that contains others may be far longer than its file.
    """
    if isinstance(value, str | bytes):
        return repr(value[:limit]) + " …" * (len(value) > limit)
    small = isinstance(value, int) and abs(value) < 10**20
    return repr(value) if value is None or small or isinstance(value, float) else typed(value)


def typed(value: object) -> str:
    """The type of a value in a message."""
    return f"a value of the type {type(value).__name__}"


def readable(path: Path) -> str:
    """A path in a message, with escapes for what is not UTF-8 or controls a terminal."""
    return one_line(os.fsencode(path).decode("utf-8", "backslashreplace"))


@contextlib.contextmanager
def reading(source: Path | str, kind: str) -> Iterator[None]:
    """Raises a `DamagedArchiveError` that names a file, whatever goes wrong in the context.

    For readers that check little, and raise almost any exception.
    """
    try:
        yield
    except ExperimentError:
        raise
    except MemoryError as error:
        raise DamagedArchiveError(
            f"{source} needs more memory than there is, or is a damaged {kind}"
        ) from error
    except Exception as error:
        why = str(error)[:300]
        raise DamagedArchiveError(
            f"{source} is not a readable {kind}: {type(error).__name__}: {why}"
        ) from error


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
    """Reads a pickle that contains only arrays, numbers, strings and containers.

    Pickles of Python 2 and of all versions of NumPy are supported. Strings of Python 2 become `str`
    with one character per byte (latin-1). Arrays are read-only. An `UnsafeArchiveError` names
    anything else.
    """
    with reading(path, "pickle"), open(regular(path), "rb") as file:
        return _unpickle(file, path.stat().st_size, path)


_LONGEST_LIST = 2**24
"""Bytes of a list of categories; that of iNaturalist has a few thousand."""


def load_torch_list(path: Path) -> list:
    """Reads a list of numbers or strings written by `torch.save`, without PyTorch.

    The file is in the zip format of PyTorch 1.6 or in the older format.
    """
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
    """Reads variables from a MATLAB file (versions 4 to 7.2).

    In a process of its own, as one changed byte can crash SciPy's reader, or let it allocate any
    amount of memory.

    Returns:
      The variables by name: arrays, numbers, strings, a dictionary for a structure, a list for
      several structures or strings. Axes of length one are removed. Arrays are read-only.

    Raises:
      DamagedArchiveError: The file has another format or is truncated, or a variable is missing.
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


# --- Zip and tar --------------------------------------------------------------------------------


class _TarInfo(tarfile.TarInfo):
    """Refuses headers that `tarfile` would read into memory whole, at any size."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """The header of a member."""
        member = super().frombuf(buf, encoding, errors)
        long = not (member.isfile() or member.isdir()) and member.size > 2**20
        if long or member.type == tarfile.GNUTYPE_SPARSE:
            raise tarfile.FilterError(f"{member.name!r} is sparse, or has a very long header")
        return member


def _check_sizes(archive: Path) -> Callable[[int], None]:
    """A function that is called with sizes, and raises once their sum is that of a bomb.

    Photographs hardly shrink, and tables of numbers to a tenth.
    """
    limit = 2**30 + 100 * archive.stat().st_size
    total = 0

    def add(size: int) -> None:
        nonlocal total
        total += size
        if total > limit:
            raise UnsafeArchiveError(
                f"{archive} would be more than {limit:,} bytes unpacked, over 100 times its size; "
                "unpack it by hand if you trust it"
            )

    return add


def extract(archive: Path, target: Path, *, keep: Callable[[str], bool] | None = None) -> Path:
    """Extracts a zip or tar file, with any compression, into a folder that it returns.

    The folder appears once it is complete. If it already exists, nothing is done. `keep` selects
    members by name.

    Raises:
      UnsafeArchiveError: A member of a tar file would be outside of the folder, is a link to the
        outside, or a device. The message names it. `zipfile` keeps all members inside. Or the
        members have more than 2³⁰ bytes and 100 times those of the archive.
      DamagedArchiveError: The archive is truncated, encrypted, or has another format.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    add = _check_sizes(archive)
    partial = Path(tempfile.mkdtemp(prefix=f"incomplete.{target.name}.", dir=target.parent))
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as members:
                for member in members.infolist():  # No more is read of a member than it states.
                    add(member.file_size)
                names = members.namelist()
                members.extractall(partial, [n for n in names if keep is None or keep(n)])
        else:
            with tarfile.open(archive, tarinfo=_TarInfo) as members:

                def chosen() -> Iterator[tarfile.TarInfo]:
                    for member in members:
                        add(tarfile.BLOCKSIZE + member.size)
                        if keep is None or keep(member.name):
                            yield member

                members.extractall(partial, chosen(), filter="data")
                # The checksum of a compressed file is verified when its end is read.
                while members.fileobj is not None and (rest := members.fileobj.read(1 << 20)):
                    add(len(rest))
        partial.rename(target)
    except tarfile.FilterError as error:
        raise UnsafeArchiveError(f"{archive}: {error}") from error
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        gzip.BadGzipFile,
        zlib.error,
        LZMAError,
        EOFError,
        RuntimeError,  # An encrypted zip file.
    ) as error:
        raise DamagedArchiveError(
            f"{archive} is damaged, encrypted, or not a zip or tar file: {error}"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


@dataclass(frozen=True, slots=True)
class TarMember:
    """A file in an uncompressed tar file, which can be read without extraction."""

    archive: Path
    name: str
    """The name, preceded by that of the inner tar file if there is one."""
    offset: int
    size: int

    def read(self) -> bytes:
        """The content; raises a `DamagedArchiveError` where the tar file is truncated."""
        if self.size > 2**29:
            raise DamagedArchiveError(f"{self.archive}: {self.name} is too large for an image")
        with open(self.archive, "rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise DamagedArchiveError(f"{self.archive} is truncated within {self.name}")
        return content


def tar_members(archive: Path) -> list[TarMember]:
    """Lists the files in an uncompressed tar file and in the tar files it contains, in order.

    Raises:
      DamagedArchiveError: The file is truncated or has another format.
    """
    found = []
    try:
        with tarfile.open(archive, "r:", tarinfo=_TarInfo) as outer:
            for member in filter(_is_plain, outer):
                name, start = member.name, member.offset_data
                if not name.endswith(".tar"):
                    found.append(TarMember(archive, name, start, member.size))
                    continue
                content = outer.extractfile(member)
                with tarfile.open(fileobj=content, mode="r:", tarinfo=_TarInfo) as inner:
                    found += [
                        TarMember(archive, f"{name}/{e.name}", start + e.offset_data, e.size)
                        for e in filter(_is_plain, inner)
                    ]
    except (tarfile.TarError, EOFError) as error:
        raise DamagedArchiveError(
            f"{archive} is damaged, or not an uncompressed tar file: {error}"
        ) from error
    return found


def _is_plain(member: tarfile.TarInfo) -> bool:
    return member.isfile() and not member.issparse()
