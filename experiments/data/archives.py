"""Archives from outside are data: pickles run no code, zips and tars stay in their folder."""

from __future__ import annotations

import gzip
import pickle
import re
import shutil
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from experiments.errors import ExperimentError


class MissingArchiveError(ExperimentError, FileNotFoundError):
    """A data set's files are not where they should be; the message says which go where."""


class DamagedArchiveError(ExperimentError, ValueError):
    """A file cannot be read, or does not hold what it should; the message names it."""


class UnsafeArchiveError(ExperimentError, ValueError):
    """A file would run code, or write outside its folder; the message names it."""


# --- Pickles ------------------------------------------------------------------------------------


class _Array(np.ndarray):
    """Takes the state of a pickled array after checking it; becomes a plain array after loading."""

    def __new__(cls, *args: object, **kwargs: object) -> _Array:
        raise UnsafeArchiveError("calls numpy.ndarray, which no pickled array does")

    def __setstate__(self, state: Any, /) -> None:
        shape, dtype, fortran, raw = state[-4:]
        dtype = _clean(dtype, "biufcSUO")
        raw = list(raw) if dtype.hasobject else _raw(raw)
        super().__setstate__((1, tuple(shape), dtype, bool(fortran), raw))  # pyright: ignore


def _clean(dtype: Any, kinds: str = "biufcSU") -> np.dtype:
    """The data type again, built from its name: a pickled state can hold flags that lie."""
    if not isinstance(dtype, np.dtype) or dtype.kind not in kinds or dtype.names:
        raise UnsafeArchiveError(f"holds an array of type {dtype!r}; plain ones are read")
    return np.dtype(dtype.str)


def _raw(content: Any) -> bytes:
    """The bytes of an array or number, which Python 2 wrote as a string."""
    if not isinstance(content, bytes | bytearray | str):
        raise UnsafeArchiveError(f"holds an array made from {type(content).__name__}")
    return content.encode("latin1") if isinstance(content, str) else bytes(content)


def _reconstruct(subtype: object, shape: object, typecode: object) -> np.ndarray:
    return np.ndarray.__new__(_Array, (0,), np.uint8)


def _dtype(name: Any, align: bool = False, copy: bool = True) -> np.dtype:
    if not isinstance(name, str):
        raise UnsafeArchiveError(f"holds a data type made from {type(name).__name__}")
    return np.dtype(name, copy=True)


def _scalar(dtype: Any, raw: Any) -> Any:
    return np.frombuffer(_raw(raw), _clean(dtype), count=1)[0]


def _from_buffer(buffer: Any, dtype: Any, shape: Any, order: str = "C") -> np.ndarray:
    array = np.frombuffer(buffer, _clean(dtype))
    return array.reshape(shape, order="F" if order == "F" else "C")


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Bytes as Python 3 writes them into pickles of protocols 0 to 2."""
    if encoding not in ("latin1", "latin-1"):
        raise UnsafeArchiveError(f"asks for the codec {encoding!r}")
    return text.encode("latin1")


def _bytes(*values: object) -> bytes:
    """Empty bytes as Python 3 writes them into pickles of protocols 0 to 2."""
    if values:
        raise UnsafeArchiveError("calls bytes(...) with arguments")
    return b""


_ADMITTED: dict[tuple[str, str], object] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    **{
        (f"numpy.{core}.{module}", name): stand_in
        for core in ("core", "_core")
        for module, name, stand_in in (
            ("multiarray", "_reconstruct", _reconstruct),
            ("multiarray", "scalar", _scalar),
            ("numeric", "_frombuffer", _from_buffer),
        )
    },
    **{
        (builtins, kind.__name__): kind
        for builtins in ("builtins", "__builtin__")
        for kind in (bool, int, float, complex, str, list, tuple, dict, set, frozenset)
    },
    **{
        (builtins, name): stand_in
        for builtins in ("builtins", "__builtin__")
        for name, stand_in in (("bytes", _bytes), ("long", int), ("unicode", str))
    },
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise UnsafeArchiveError(f"asks for {module}.{name}") from None


def _plain(value: Any) -> Any:
    """The same value with every `_Array` turned into a plain array, in place where possible."""
    if isinstance(value, _Array):
        value = value.view(np.ndarray)
        if value.dtype.hasobject:
            for index in np.ndindex(value.shape):
                value[index] = _plain(value[index])
    elif isinstance(value, dict):
        for key, item in value.items():
            value[key] = _plain(item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            value[i] = _plain(item)
    elif type(value) is tuple:
        value = tuple(_plain(item) for item in value)
    return value


def _unpickle(file: IO[bytes], source: str) -> Any:
    try:
        return _plain(_Unpickler(file, encoding="latin1").load())
    except UnsafeArchiveError as error:
        raise UnsafeArchiveError(
            f"{source} {error}. Only arrays, numbers, strings and containers are read from a "
            "pickle; it may hold code, and nothing of it was run."
        ) from None
    except MemoryError:
        raise
    except Exception as error:
        # A damaged pickle can raise nearly anything: it is a program for a small machine.
        raise DamagedArchiveError(
            f"{source} is no readable pickle: {type(error).__name__}: {error}"
        ) from error


def load_pickle(path: Path) -> Any:
    """Reads a pickle that holds arrays, numbers, strings and containers, and nothing else.

    Pickles of Python 2 and of NumPy before and after 2.0 are read; strings of Python 2 come
    as `str`, byte for byte (latin-1).

    Args:
      path: The file.

    Returns:
      The object.

    Raises:
      UnsafeArchiveError: The pickle asks for anything else; the message names it.
      DamagedArchiveError: The file is cut off or no pickle.
    """
    with open(path, "rb") as file:
        return _unpickle(file, str(path))


def load_torch_list(path: Path) -> list:
    """Reads a list of numbers or strings that `torch.save` wrote, without PyTorch.

    Args:
      path: The file, in the zip format of PyTorch 1.6 and later or the older one.

    Returns:
      The list.

    Raises:
      UnsafeArchiveError: The file holds more than plain values.
      DamagedArchiveError: The file is cut off, or holds no list.
    """
    value = None
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                [name] = [n for n in archive.namelist() if n.split("/")[-1] == "data.pkl"]
                with archive.open(name) as file:
                    value = _unpickle(file, str(path))
        except (ValueError, zipfile.BadZipFile, zlib.error) as error:
            if isinstance(error, UnsafeArchiveError | DamagedArchiveError):
                raise
            raise DamagedArchiveError(f"{path} is no file of torch.save: {error}") from error
    else:
        with open(path, "rb") as file:
            # The old format: a magic number, the protocol, facts on the machine, the object.
            for _ in range(4):
                value = _unpickle(file, str(path))
    if not isinstance(value, list):
        raise DamagedArchiveError(f"{path} holds {type(value).__name__}, not a list")
    return value


# --- MATLAB -------------------------------------------------------------------------------------


def load_mat(path: Path, *names: str) -> dict[str, Any]:
    """Reads variables from a MATLAB file of versions 4 to 7.2.

    Args:
      path: The file.
      *names: The variables.

    Returns:
      The variables by name: arrays, numbers, strings, a dictionary for a structure, and a list or
      an object array for several. Axes of length one are dropped.

    Raises:
      DamagedArchiveError: The file is of another kind or cut off, or a variable is missing.
    """
    # Most data sets do without, and it takes a while to import.
    from scipy.io import loadmat

    try:
        content = loadmat(path, appendmat=False, simplify_cells=True, variable_names=names)
    except MemoryError:
        raise
    except Exception as error:
        # The reader checks little and raises nearly anything.
        raise DamagedArchiveError(
            f"{path} is no readable MATLAB file: {type(error).__name__}: {error}"
        ) from error
    missing = [name for name in names if name not in content]
    if missing:
        raise DamagedArchiveError(f"{path} has no variable {', '.join(missing)}")
    return {name: content[name] for name in names}


# --- Zip and tar --------------------------------------------------------------------------------


def extract(archive: Path, target: Path, *, keep: Callable[[str], bool] | None = None) -> Path:
    """Extracts a zip or tar into a folder that appears once it is complete.

    Members are written as plain files and folders: a link within the archive becomes a copy of
    what it points to, and anything that would leave the folder stops the extraction.

    Args:
      archive: A zip, or a tar with any compression.
      target: The folder to make. If it is there already, nothing is done.
      keep: Which members to extract, by name; all by default.

    Returns:
      The folder.

    Raises:
      UnsafeArchiveError: A member has an absolute path, climbs out by `..`, links to the
        outside, or is a device; the message names it.
      DamagedArchiveError: The archive is cut off or of another kind.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"incomplete.{target.name}.", dir=target.parent))
    try:
        if zipfile.is_zipfile(archive):
            _extract_zip(archive, partial, keep)
        else:
            _extract_tar(archive, partial, keep)
        partial.rename(target)
    except (
        *(tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile),
        *(zlib.error, LZMAError, EOFError),
    ) as error:
        raise DamagedArchiveError(f"{archive} is damaged or no zip or tar: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _inside(archive: Path, name: str) -> PurePosixPath:
    """A member's path, checked to stay within the folder on any system."""
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or re.match(r"[A-Za-z]:", name):
        raise UnsafeArchiveError(f"{archive}: the member {name!r} has an absolute path")
    if ".." in path.parts:
        raise UnsafeArchiveError(f"{archive}: the member {name!r} leads out of the folder")
    return path


def _write(source: IO[bytes], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)


def _extract_zip(archive: Path, folder: Path, keep: Callable[[str], bool] | None) -> None:
    with zipfile.ZipFile(archive) as members:
        for member in members.infolist():
            path = _inside(archive, member.filename)
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise UnsafeArchiveError(
                    f"{archive}: the member {member.filename!r} is a link or a special file"
                )
            if member.flag_bits & 1:
                raise DamagedArchiveError(f"{archive}: {member.filename!r} is encrypted")
            if not member.is_dir() and (keep is None or keep(member.filename)):
                with members.open(member) as source:
                    _write(source, folder / path)


def _extract_tar(archive: Path, folder: Path, keep: Callable[[str], bool] | None) -> None:
    with tarfile.open(archive) as members:
        for member in members:
            path = _inside(archive, member.name)
            if member.issym() or member.islnk():
                _check_link(archive, path, member)
            elif not (member.isfile() or member.isdir()):
                raise UnsafeArchiveError(f"{archive}: the member {member.name!r} is a device")
            if member.isdir() or not (keep is None or keep(member.name)):
                continue
            try:
                source = members.extractfile(member)
            except KeyError:
                source = None
            if source is None:
                raise DamagedArchiveError(
                    f"{archive}: the link {member.name!r} points to no file of the archive"
                )
            with source:
                _write(source, folder / path)
        # A compressed file is checked against its sum when its end is read.
        while members.fileobj is not None and members.fileobj.read(1 << 20):
            pass


def _check_link(archive: Path, path: PurePosixPath, member: tarfile.TarInfo) -> None:
    link = member.linkname.replace("\\", "/")
    # A symbolic link starts at its own folder, a hard link at the top of the archive.
    depth = len(path.parent.parts) if member.issym() else 0
    outside = PurePosixPath(link).is_absolute() or re.match(r"[A-Za-z]:", link)
    for part in PurePosixPath(link).parts:
        depth += -1 if part == ".." else 1
        outside = outside or depth < 0
    if outside:
        raise UnsafeArchiveError(
            f"{archive}: the link {member.name!r} points outside, to {member.linkname!r}"
        )


@dataclass(frozen=True, slots=True)
class TarMember:
    """A file within a tar that is not compressed: bytes that can be read where they are."""

    archive: Path
    name: str
    """Behind the name of the inner tar, if it is in one."""
    offset: int
    size: int

    def read(self) -> bytes:
        """Its content.

        Raises:
          DamagedArchiveError: The tar is cut off.
        """
        with open(self.archive, "rb") as file:
            file.seek(self.offset)
            content = file.read(self.size)
        if len(content) < self.size:
            raise DamagedArchiveError(f"{self.archive} is cut off within {self.name}")
        return content


def tar_members(archive: Path) -> list[TarMember]:
    """The files in a tar, and in tars within it, without extracting anything.

    Args:
      archive: A tar that is not compressed.

    Returns:
      The files, in order.

    Raises:
      DamagedArchiveError: It is cut off or no such tar.
    """
    found = []
    try:
        with tarfile.open(archive, "r:") as outer:
            for member in outer:
                if not member.isfile() or member.issparse():
                    continue
                if not member.name.endswith(".tar"):
                    found.append(TarMember(archive, member.name, member.offset_data, member.size))
                    continue
                with tarfile.open(fileobj=outer.extractfile(member), mode="r:") as inner:
                    found += [
                        TarMember(
                            archive,
                            f"{member.name}/{entry.name}",
                            member.offset_data + entry.offset_data,
                            entry.size,
                        )
                        for entry in inner
                        if entry.isfile() and not entry.issparse()
                    ]
    except (tarfile.TarError, EOFError) as error:
        raise DamagedArchiveError(
            f"{archive} is damaged or no uncompressed tar: {error}"
        ) from error
    return found
