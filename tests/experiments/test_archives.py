import collections
import io
import pickle
import tarfile
import zipfile
from functools import partial

import numpy as np
import pytest
from numpy._core import multiarray, numeric

from experiments.datasets.archives import (
    DamagedArchiveError,
    UnsafeArchiveError,
    extract,
    tar_members,
)
from experiments.datasets.pickles import load_pickle, load_torch_list

PLAIN = {
    "image_data": np.random.default_rng(0).integers(0, 256, (3, 4, 5, 3), dtype=np.uint8),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big endian": np.arange(3, dtype=">i4"),
    "strings": np.array(["ab", "ç"]),
    "bytes": np.array([b"ab", b"c"]),
    "empty": np.zeros((0, 2), np.float32),
    "zero-dimensional": np.array(1.5),
    "scalars": [np.float32(0.5), np.int64(-3), np.bool_(True)],
    "plain": [1, -(2**70), 1.5, 1j, True, None, "ü", b"\x00\xff", b"", (1, (np.arange(2),))],
    "containers": {"set": {1, 2}, "frozen": frozenset({3}), "list": [[]]},
    "ordered": collections.OrderedDict(a=1, b=[np.arange(2)]),
    "default": collections.defaultdict(list, {"a": [1]}),
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("core", ["core", "_core"])
def test_plain_pickles_are_read(tmp_path, protocol, core):
    data = pickle.dumps(PLAIN, protocol=protocol)
    if protocol < 4:  # later protocols write a length before the name
        data = data.replace(b"numpy._core.", f"numpy.{core}.".encode())
    path = tmp_path / "data.pkl"
    path.write_bytes(data)
    found, expected = load_pickle(path), pickle.loads(data)
    # NumPy may give an array of foreign byte order in its own.
    np.testing.assert_array_equal(found.pop("big endian"), expected.pop("big endian"))
    assert repr(found) == repr(expected)


class _Call:
    """Pickles as a call of anything."""

    def __init__(self, function, *args, state=None):
        self.value = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.value


def test_strings_of_python_2_are_read(tmp_path):
    """Of one character per byte, also where they are the content of an array."""
    (tmp_path / "text.pkl").write_bytes(b"U\x04caf\xe9.")
    assert load_pickle(tmp_path / "text.pkl") == "café"
    images = np.arange(256, dtype=np.uint8).reshape(2, 8, 16)
    state = (1, images.shape, images.dtype, False, images.tobytes().decode("latin1"))
    array = _Call(multiarray._reconstruct, np.ndarray, (0,), b"b", state=state)
    (tmp_path / "array.pkl").write_bytes(pickle.dumps(array, protocol=2))
    np.testing.assert_array_equal(load_pickle(tmp_path / "array.pkl"), images)


_MARK = "touched-by-a-pickle"
_LYING = (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0)

MALICIOUS = {
    "os.system": b"cos\nsystem\n(S'touch touched-by-a-pickle'\ntR.",
    "INST": b"(S'touch touched-by-a-pickle'\nios\nsystem\n.",
    "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02ls\x85R.",
    "eval": pickle.dumps(_Call(eval, f"open({_MARK!r}, 'w')")),
    "numpy.load": pickle.dumps(_Call(np.load, "x", None, True)),
    "a dotted name": b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",
    "numpy.ndarray called": pickle.dumps(_Call(np.ndarray, (1,), "O", b"12345678")),
    "object scalar": pickle.dumps(_Call(multiarray.scalar, np.dtype("O"), b"12345678")),
    "object array": pickle.dumps(np.array(["a", None])),
    "object buffer": pickle.dumps(
        _Call(vars(numeric)["_frombuffer"], b"12345678", np.dtype("O"), (1,), "C"), protocol=5
    ),
    "a data type with hidden objects": pickle.dumps(
        _Call(
            multiarray._reconstruct,
            np.ndarray,
            (0,),
            b"b",
            state=(1, (1,), _Call(np.dtype, "V8", state=_LYING), False, b"12345678"),
        )
    ),
    "a data type of fields": pickle.dumps(_Call(np.dtype, [("a", "O")])),
}


# Without a global it is no attack, but nothing that could be read either.
_WHOLE = pickle.dumps(PLAIN["image_data"])
_SHORT = (1, (1000,), np.dtype("u1"), False, b"12")
DAMAGED = {
    "EXT": b"\x80\x02\x82\x01.",
    "persistent id": b"\x80\x02K\x01Q.",
    **{f"cut at {length}": _WHOLE[:length] for length in (0, 40, 150, -1)},
    "fewer bytes than the shape takes": pickle.dumps(
        _Call(multiarray._reconstruct, np.ndarray, (0,), b"b", state=_SHORT)
    ),
}


@pytest.mark.parametrize("kind", MALICIOUS | DAMAGED)
def test_a_pickle_that_asks_for_more_or_is_damaged_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data.pkl"
    path.write_bytes((MALICIOUS | DAMAGED)[kind])
    named = r"data\.pkl requests os\.system" if kind == "os.system" else r"data\.pkl"
    error = UnsafeArchiveError if kind in MALICIOUS else DamagedArchiveError
    with pytest.raises(error, match=named):
        load_pickle(path)
    assert not (tmp_path / _MARK).exists()


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ({"cats/data.pkl": MALICIOUS["os.system"]}, UnsafeArchiveError, ""),
        ({"cats/other": b""}, DamagedArchiveError, ""),
        ({}, DamagedArchiveError, ""),
        (
            {"cats/data.pkl": pickle.dumps([5])},
            DamagedArchiveError,
            " is not a readable file of torch.save",
        ),
    ],
)
def test_other_content_of_torch_is_refused(tmp_path, content, error, message):
    path = _zip(tmp_path / "cats.pth", content.items())
    if message:
        path.write_bytes(path.read_bytes().replace(b"PK\x01\x02", b"PK\x01\x00"))
    with pytest.raises(error, match=r"cats\.pth" + message):
        load_torch_list(path)


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


def _tar(path, members, mode="w"):
    path.write_bytes(_tar_bytes(members, mode))
    return path


def _member(name, kind, target=""):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def _zip(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def _content(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("kind", ["zip", "tar", "tar.gz", "tar.xz"])
def test_an_archive_is_extracted_whole_or_what_is_kept_of_it(tmp_path, kind):
    path, target = tmp_path / f"data.{kind}", tmp_path / "out/data"
    if kind == "zip":
        _zip(path, [("set/", b""), *FILES.items()])
    else:
        members = [_member("set", tarfile.DIRTYPE), *FILES.items()]
        _tar(path, members, "w:" + kind.partition(".")[2])
    assert extract(path, target) == target
    assert _content(target) == FILES
    assert [p.name for p in target.parent.iterdir()] == ["data"]
    some = extract(path, tmp_path / "some", keep=lambda name: name.endswith(".png"))
    assert _content(some) == {k: v for k, v in FILES.items() if k.endswith(".png")}
    # What is extracted stays.
    extract(path, some)
    assert len(_content(some)) == 2


def test_a_tar_that_leaves_its_folder_is_refused(tmp_path):
    """By the filter of the library; and nothing of it stays."""
    inner = tmp_path / "inner"
    inner.mkdir()
    path = _tar(inner / "data.tar", [("fine.txt", b"y"), ("a/../../out.txt", b"x")])
    with pytest.raises(UnsafeArchiveError, match=r"data\.tar"):
        extract(path, inner / "out")
    assert [p.name for p in inner.iterdir()] == ["data.tar"]
    assert [p.name for p in tmp_path.iterdir()] == ["inner"]


def _zip_that_states(path, size):
    _zip(path, [("a", b"1")])
    small, large = ((1).to_bytes(4, "little") + number for number in (b"\1\0\0\0", size))
    path.write_bytes(path.read_bytes().replace(small, large))


def _tar_that_states(path, size, kind=tarfile.REGTYPE, mode="w:gz"):
    member = _member("a", kind)
    member.size = int.from_bytes(size, "little")
    _tar(path, [member], mode)


_LONG = "'a' is sparse, or has a very long header"
_BOMB = r"data would be more than 1,073,7\d\d,\d\d\d bytes unpacked, over 100 times its size"


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (_zip_that_states, _BOMB),
        (_tar_that_states, _BOMB),
        (partial(_tar_that_states, kind=tarfile.XHDTYPE), _LONG),
        (partial(_tar_that_states, kind=tarfile.GNUTYPE_LONGNAME), _LONG),
        (partial(_tar_that_states, kind=tarfile.GNUTYPE_SPARSE), _LONG),
    ],
)
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, write, error):
    write(tmp_path / "data", (2**31).to_bytes(4, "little"))
    with pytest.raises(UnsafeArchiveError, match=error):
        extract(tmp_path / "data", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


def test_a_tar_with_a_header_of_gigabytes_is_not_read(tmp_path):
    _tar_that_states(tmp_path / "a.tar", (2**31).to_bytes(4, "little"), tarfile.XHDTYPE, "w")
    with pytest.raises(DamagedArchiveError, match=rf"a\.tar is damaged.*: {_LONG}"):
        tar_members(tmp_path / "a.tar")


_NOISE = np.random.default_rng(0).bytes(50_000)
_TGZ = partial(_tar, mode="w:gz")


@pytest.mark.parametrize(
    ("write", "damage"),
    [
        *((write, lambda content: content[:70_000]) for write in (_TGZ, _tar, _zip)),
        # A wrong sum.
        (_TGZ, lambda content: content[:-8] + bytes([content[-8] ^ 1]) + content[-7:]),
        (_zip, lambda content: content.replace(_NOISE, _NOISE[::-1], 1)),
    ],
)
def test_a_damaged_archive_leaves_nothing(tmp_path, write, damage):
    path = write(tmp_path / "data", [("a", _NOISE), ("b", _NOISE)])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DamagedArchiveError, match="data"):
        extract(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["data"]


_INNER = {"n1/a.JPEG": b"a" * 700, "b.JPEG": b"", "x" * 150 + ".JPEG": b"long name"}


def test_members_are_read_where_they_are(tmp_path):
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE)
    others = [_member(f"kind{kind!r}", kind, "/etc/passwd") for kind in kinds]
    inner = _tar_bytes([*_INNER.items(), *others])
    outer = [("n1.tar", inner), *others, ("../plain.JPEG", b"p"), ("n2.tar", inner)]
    members = tar_members(_tar(tmp_path / "outer.tar", outer))
    assert [member.name for member in members] == [
        *(f"n1.tar/{name}" for name in _INNER),
        "../plain.JPEG",
        *(f"n2.tar/{name}" for name in _INNER),
    ]
    contents = list(_INNER.values())
    assert [member.read() for member in members] == [*contents, b"p", *contents]


def test_other_files_are_no_tars(tmp_path):
    whole, path = _tar_bytes(_INNER.items()), tmp_path / "a.tar"
    inner = [_tar_bytes([("n1.tar", content)]) for content in (b"no tar" * 200, whole[:600])]
    for content in (b"", b"something" * 100, _tar_bytes(_INNER.items(), "w:gz"), *inner):
        path.write_bytes(content)
        with pytest.raises(DamagedArchiveError, match=r"a\.tar"):
            tar_members(path)
