"""Archives, pickles and lists of others: what is read, and what damaged and hostile ones get."""

import gzip
import io
import os
import pickle
import tarfile
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from numpy._core import multiarray, numeric

from experiments.datasets.archives import (
    DamagedArchiveError,
    UnsafeArchiveError,
    extract,
    tar_members,
)
from experiments.datasets.images import SourceImage, encode
from experiments.datasets.pickles import load_mat, load_pickle, load_torch_list
from experiments.datasets.readers import (
    read_idx,
    read_json,
    read_lines,
    read_table,
    read_xml,
    relative,
)

# --- What is read -------------------------------------------------------------------------------

PLAIN = {
    "image_data": np.random.default_rng(0).integers(0, 256, (3, 4, 5, 3), dtype=np.uint8),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big endian": np.arange(3, dtype=">i4"),
    "strings": np.array(["ab", "ç"]),
    "empty": np.zeros((0, 2), np.float32),
    "zero-dimensional": np.array(1.5),
    "scalars": [np.float32(0.5), np.int64(-3), np.bool_(True)],
    "plain": [1, -(2**70), 1.5, True, None, "ü", b"\x00\xff", b"", (1, (np.arange(2),))],
    "ordered": OrderedDict(a=1, b=[np.arange(2)]),
}


def _same(found, expected):
    """Whether two values of the kinds of `PLAIN` are equal."""
    if isinstance(expected, np.ndarray):
        # NumPy may give an array of foreign byte order in its own.
        assert found.dtype.newbyteorder("=") == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict | list | tuple):
        if isinstance(expected, dict):
            found, expected = [*found.items()], [*expected.items()]
        for pair in zip(found, expected, strict=True):
            _same(*pair)
    else:
        assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("core", ["core", "_core"])
def test_plain_pickles_are_read(tmp_path, protocol, core):
    data = pickle.dumps(PLAIN, protocol=protocol)
    if protocol < 4:  # later protocols write a length before the name
        data = data.replace(b"numpy._core.", f"numpy.{core}.".encode())
    (tmp_path / "data.pkl").write_bytes(data)
    _same(load_pickle(tmp_path / "data.pkl"), PLAIN)


class _Call:
    """Pickles as a call of anything."""

    def __init__(self, function, *args, state=None):
        self.value = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.value


def _array_of(dtype, shape, content):
    state = (1, shape, dtype, False, content)
    return _Call(multiarray._reconstruct, np.ndarray, (0,), b"b", state=state)


def test_strings_of_python_2_are_read(tmp_path):
    """Of one character per byte, also where they are the content of an array."""
    (tmp_path / "text.pkl").write_bytes(b"U\x04caf\xe9.")
    assert load_pickle(tmp_path / "text.pkl") == "café"
    images = np.arange(256, dtype=np.uint8).reshape(2, 8, 16)
    array = _array_of(images.dtype, images.shape, images.tobytes().decode("latin1"))
    (tmp_path / "array.pkl").write_bytes(pickle.dumps(array, protocol=2))
    np.testing.assert_array_equal(load_pickle(tmp_path / "array.pkl"), images)


@pytest.mark.parametrize("zipped", [True, False])
def test_lists_of_torch_are_read(tmp_path, zipped):
    torch.save([3, 500], tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    assert load_torch_list(tmp_path / "a.pth") == [3, 500]


FILES = {"top.txt": b"1", "set/images/a.png": b"22", "set/images/b.png": b"333", "set/list": b""}


def _tar_bytes(members, mode="w"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # pyright: ignore
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
            else:
                name, content = member
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _member(name, kind, target=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def _zip_bytes(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return buffer.getvalue()


def _content(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.xz"])
def test_an_archive_is_extracted_whole_or_what_is_kept_of_it(tmp_path, kind):
    content = _zip_bytes([("set/", b""), *FILES.items()])
    if kind != "zip":
        members = [_member("set", tarfile.DIRTYPE), *FILES.items()]
        content = _tar_bytes(members, "w:" + kind.partition(".")[2])
    (path := tmp_path / f"data.{kind}").write_bytes(content)
    assert _content(extract(path, tmp_path / "out/data")) == FILES
    some = extract(path, tmp_path / "some", keep=lambda name: name.endswith(".png"))
    assert _content(some) == {k: v for k, v in FILES.items() if k.endswith(".png")}
    extract(path, some)  # What is extracted stays.
    assert len(_content(some)) == 2


_INNER = {"n1/a.JPEG": b"a" * 700, "b.JPEG": b"", "x" * 150 + ".JPEG": b"long name"}


def test_members_are_read_where_they_are(tmp_path):
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE)
    others = [_member(f"kind{kind!r}", kind, "/etc/passwd") for kind in kinds]
    inner = _tar_bytes([*_INNER.items(), *others])
    outer = [("n1.tar", inner), *others, ("../plain.JPEG", b"p"), ("n2.tar", inner)]
    (tmp_path / "outer.tar").write_bytes(_tar_bytes(outer))
    found = {member.name: member.read() for member in tar_members(tmp_path / "outer.tar")}
    expected = {f"n{n}.tar/{name}": content for n in (1, 2) for name, content in _INNER.items()}
    assert found == expected | {"../plain.JPEG": b"p"}


# --- What is refused ----------------------------------------------------------------------------

_MARK = "touched"
_LYING = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)
_SYSTEM = b"cos\nsystem\n(S'touch touched'\ntR."
_WHOLE = pickle.dumps(PLAIN["image_data"])
_NOISE = np.random.default_rng(0).bytes(50_000)
_PAIR = [("a", _NOISE), ("b", _NOISE)]
_TGZ = _tar_bytes(_PAIR, "w:gz")
_TAR = _tar_bytes(_INNER.items())


def _leads_out(*members):
    return _tar_bytes([("fine.txt", b"y"), *members])


def _extracted(path):
    return extract(path, path.parent / "out")


def _table(path):
    return [*read_table(path, "file", delimiters=",;")[1]]


UNSAFE = [
    (load_pickle, _SYSTEM),
    (load_pickle, b"(S'touch touched'\nios\nsystem\n."),
    (load_pickle, b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R."),
    (load_pickle, pickle.dumps(_Call(eval, f"open({_MARK!r}, 'w')"))),
    (load_pickle, pickle.dumps(_Call(np.load, "x", None, True))),
    (load_pickle, b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93."),  # A dotted name.
    # Objects: as a scalar, in an array, from a buffer, hidden in a type, and in a field.
    (load_pickle, pickle.dumps(_Call(multiarray.scalar, np.dtype("O"), b"8" * 8))),
    (load_pickle, pickle.dumps(np.array(["a", None]))),
    (load_pickle, pickle.dumps(_Call(vars(numeric)["_frombuffer"], b"8" * 8, np.dtype("O"), (1,)))),
    (load_pickle, pickle.dumps(_array_of(_Call(np.dtype, "V8", state=_LYING), (1,), b"8" * 8))),
    (load_pickle, pickle.dumps(_Call(np.dtype, [("a", "O")]))),
    (load_torch_list, _zip_bytes([("cats/data.pkl", _SYSTEM)])),
    (_extracted, _leads_out(("a/../../out.txt", b"x"))),
    (_extracted, _leads_out(_member("a", tarfile.SYMTYPE, "../.."))),
    (_extracted, _leads_out(_member("a", tarfile.LNKTYPE, "/etc/x"))),
    (_extracted, _leads_out(_member("a", tarfile.CHRTYPE))),
]
_GROWS = b'<!DOCTYPE a [<!ENTITY b "' + b"x" * 10**5 + b'">]><a>' + b"&b;" * 10**5 + b"</a>"
DAMAGED = [
    (load_pickle, pickle.dumps(_Call(np.ndarray, (1,), "O", b"8" * 8))),
    (load_pickle, b"\x80\x02\x82\x01."),  # An extension.
    (load_pickle, b"\x80\x02K\x01Q."),  # A persistent id.
    *((load_pickle, _WHOLE[:length]) for length in (0, 40, 150, -1)),
    *(
        (load_pickle, pickle.dumps(_array_of(np.dtype("u1"), shape, b"12")))
        for shape in ((1000,), (-1, -2), (2**62, 8))
    ),
    (lambda path: load_pickle(path, "data"), pickle.dumps({})),
    (load_torch_list, _zip_bytes([("cats/other", b"")])),
    (load_torch_list, _zip_bytes([("cats/data.pkl", pickle.dumps(5))])),
    (lambda path: load_mat(path, "x"), b"MATLAB 5"),
    (read_lines, "ä".encode("utf-16-le") + b"\xff"),
    (_table, b"label\na\n"),
    (_table, b'file,label\n"a,b\n'),
    (_table, b"file,label\na\n"),
    (_table, b"file,label,label\na,b,c\n"),
    *((read_json, content) for content in (b'{"a": ', b"[" * 10**6)),
    *((read_xml, content) for content in (b"<a><b></a>", _GROWS)),
    (read_idx, b"<html>"),
    (read_idx, b"\0\0\x08\xff" + bytes(1020)),  # 255 axes.
    (read_idx, b"\0\0\x0d\1" + bytes(8)),  # Floats.
    (read_idx, b"\0\0\x08\1\0\0\0\x09" + bytes(8)),
    (read_idx, gzip.compress(b"\0\0\x08\1\0\0\0\x09" + bytes(9))[:-9]),
    (_extracted, b"something"),
    (_extracted, _TGZ[:70_000]),
    (_extracted, _TGZ[:-8] + bytes([_TGZ[-8] ^ 1]) + _TGZ[-7:]),  # A wrong sum.
    (_extracted, _tar_bytes(_PAIR)[:70_000]),
    (_extracted, _zip_bytes(_PAIR)[:70_000]),
    (_extracted, _zip_bytes(_PAIR).replace(_NOISE, _NOISE[::-1], 1)),
    (tar_members, b""),
    (tar_members, b"something" * 100),
    (tar_members, _tar_bytes(_INNER.items(), "w:gz")),
    (tar_members, _tar_bytes([("n1.tar", b"no tar" * 200)])),
    (tar_members, _tar_bytes([("n1.tar", _TAR[:600])])),
]


@pytest.mark.parametrize("number", range(len(UNSAFE) + len(DAMAGED)))
def test_hostile_and_damaged_files_are_refused_by_name(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    read, content = [*UNSAFE, *DAMAGED][number]
    (folder := tmp_path / "inner").mkdir()
    (folder / "given").write_bytes(content)
    kind = UnsafeArchiveError if number < len(UNSAFE) else DamagedArchiveError
    with pytest.raises(kind, match="given") as error:
        read(folder / "given")
    assert len(str(error.value)) < 700
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]


@pytest.mark.parametrize(
    "name",
    [
        *("../x.jpg", "/etc/x", "..\\x", "a/../../x", "C:x.jpg", "\\\\host\\x", "..", ".", ""),
        *(" \0", "a\n", "\ud800", None, 1, [], b"../x"),
    ],
)
def test_a_path_in_a_list_stays_in_its_folder(name):
    with pytest.raises(DamagedArchiveError, match=r"val\.csv, line 3"):
        relative(name, "val.csv, line 3")
    assert relative("./a b/c\\d.jpg", "") == "a b/c/d.jpg"


def _image(path):
    return encode(SourceImage(path, str(path)), (64, 64, 3))


@pytest.mark.parametrize(
    "read",
    [_image, load_pickle, load_torch_list, load_mat, read_lines, read_json, read_xml, read_idx],
)
def test_pipes_and_folders_are_refused(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(DamagedArchiveError, match=path.name):
            read(path)


def test_a_matlab_file_that_ends_its_reader_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "a.mat").write_bytes(b"")
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    monkeypatch.setattr("experiments.datasets.pickles._LOAD_MAT", crash)
    with pytest.raises(DamagedArchiveError, match=r"a\.mat is not .*status -11"):
        load_mat(tmp_path / "a.mat", "x")
