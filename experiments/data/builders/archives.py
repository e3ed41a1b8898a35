"""Safe reading of downloaded files: pickles run no code, archives stay inside their folder.

`pickle` runs code unless its globals are restricted, which is done here. Archives are left to
`zipfile` and to the `data` filter of `tarfile`.
"""

from __future__ import annotations

import gzip
import pickle
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from experiments.errors import ExperimentError


class MissingArchiveError(ExperimentError, FileNotFoundError):
    """Files of a data set are missing. The message lists the files and folders."""


class DamagedArchiveError(ExperimentError, ValueError):
    """A file is unreadable, or its content is not as expected. The message names it."""


class UnsafeArchiveError(ExperimentError, ValueError):
    """A file would run code, write outside its folder, or fill the disk. The message names it."""


# --- Pickles ------------------------------------------------------------------------------------


class _Array(np.ndarray):
    """Checks the state of a pickled array. Converted to a plain array after loading."""

    def __new__(cls, *args: object, **kwargs: object) -> _Array:
        raise UnsafeArchiveError("calls numpy.ndarray, which pickled arrays do not do")

    def __setstate__(self, state: Any, /) -> None:
        shape, dtype, fortran, raw = state[-4:]
        state = (1, tuple(shape), _plain_dtype(dtype), bool(fortran), _raw(raw))
        super().__setstate__(state)  # pyright: ignore


def _plain_dtype(dtype: Any) -> np.dtype:
    """Recreates a data type from its name, because a pickled state can contain wrong flags."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in "biufcSU" or dtype.names:
        raise UnsafeArchiveError(f"contains an array of the unsupported type {dtype!r}")
    return np.dtype(dtype.str)


def _raw(content: Any) -> bytes:
    """The bytes of an array or number. Python 2 stored them as a string."""
    if not isinstance(content, bytes | bytearray | str):
        raise UnsafeArchiveError(f"contains an array made from {type(content).__name__}")
    return content.encode("latin1") if isinstance(content, str) else bytes(content)


def _reconstruct(subtype: object, shape: object, typecode: object) -> np.ndarray:
    return np.ndarray.__new__(_Array, (0,), np.uint8)


def _dtype(name: Any, align: bool = False, copy: bool = True) -> np.dtype:
    if not isinstance(name, str):
        raise UnsafeArchiveError(f"contains a data type made from {type(name).__name__}")
    return np.dtype(name, copy=True)


def _scalar(dtype: Any, raw: Any) -> Any:
    return np.frombuffer(_raw(raw), _plain_dtype(dtype), count=1)[0]


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: Any = "C") -> np.ndarray:
    return np.frombuffer(buffer, _plain_dtype(dtype)).reshape(shape, order=order)


def _latin1(text: str = "", encoding: str = "latin1") -> bytes:
    """Bytes, as Python 3 writes them with protocols 0 to 2."""
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], object] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _latin1,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
}
for _core in ("core", "_core"):
    _ALLOWED[f"numpy.{_core}.multiarray", "_reconstruct"] = _reconstruct
    _ALLOWED[f"numpy.{_core}.multiarray", "scalar"] = _scalar
    _ALLOWED[f"numpy.{_core}.numeric", "_frombuffer"] = _from_buffer
for _builtins in ("builtins", "__builtin__"):
    for _type in (bool, int, float, complex, str, list, tuple, dict, set, frozenset):
        _ALLOWED[_builtins, _type.__name__] = _type
    _ALLOWED |= {(_builtins, "bytes"): _latin1, (_builtins, "long"): int}
    _ALLOWED[_builtins, "unicode"] = str


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise UnsafeArchiveError(f"requests {module}.{name}") from None


def _plain(value: Any) -> Any:
    """Converts every `_Array` in a value to a plain array, in place where possible."""
    if isinstance(value, _Array):
        return value.view(np.ndarray)
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            value[key] = _plain(item)
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _unpickle(file: IO[bytes], source: str) -> Any:
    try:
        return _plain(_Unpickler(file, encoding="latin1").load())
    except UnsafeArchiveError as error:
        raise UnsafeArchiveError(
            f"{source} {error}. Only arrays, numbers, strings and containers are read from a "
            "pickle. No code of the file was run."
        ) from None
    except MemoryError:
        raise
    except Exception as error:
        # A pickle is a program, so a damaged one can raise almost any exception.
        raise DamagedArchiveError(
            f"{source} is not a readable pickle: {type(error).__name__}: {error}"
        ) from error


def load_pickle(path: Path) -> Any:
    """Reads a pickle that contains only arrays, numbers, strings and containers.

    Pickles of Python 2 and of all versions of NumPy are supported. Strings of Python 2 become `str`
    with one character per byte (latin-1). An `UnsafeArchiveError` names anything else.
    """
    with open(path, "rb") as file:
        return _unpickle(file, str(path))


def load_torch_list(path: Path) -> list:
    """Reads a list of numbers or strings written by `torch.save`, without PyTorch.

    The file is in the zip format of PyTorch 1.6 or in the older format.
    """
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                names = [name for name in archive.namelist() if name.split("/")[-1] == "data.pkl"]
                if len(names) != 1:
                    raise DamagedArchiveError(f"{path} was not written by torch.save")
                with archive.open(names[0]) as file:
                    value = _unpickle(file, str(path))
        except (zipfile.BadZipFile, zlib.error) as error:
            raise DamagedArchiveError(f"{path} is not a readable zip file: {error}") from error
    else:
        with open(path, "rb") as file:
            # The old format: a magic number, the protocol, system information, the object.
            _, _, _, value = (_unpickle(file, str(path)) for _ in range(4))
    if not isinstance(value, list):
        raise DamagedArchiveError(f"{path} contains {type(value).__name__}, not a list")
    return value


# --- MATLAB -------------------------------------------------------------------------------------


def load_mat(path: Path, *names: str) -> dict[str, Any]:
    """Reads variables from a MATLAB file (versions 4 to 7.2).

    Returns:
      The variables by name: arrays, numbers, strings, a dictionary for a structure, a list or
      object array for several structures. Axes of length one are removed.

    Raises:
      DamagedArchiveError: The file has another format or is truncated, or a variable is missing.
    """
    from scipy.io import loadmat  # Slow to import.

    try:
        content = loadmat(path, appendmat=False, simplify_cells=True, variable_names=names)
    except MemoryError:
        raise
    except Exception as error:
        # The reader checks little, and raises almost any exception.
        raise DamagedArchiveError(
            f"{path} is not a readable MATLAB file: {type(error).__name__}: {error}"
        ) from error
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
            raise tarfile.FilterError(f"the header of {member.name!r} has {member.size:,} bytes")
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
