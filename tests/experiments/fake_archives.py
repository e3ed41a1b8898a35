"""Tiny archives in the layouts in which people have the few-shot sets.

Every image is of one colour, its own, so that a test can tell which image it sees:
`colour(name, i)` for image i of class `name`.
"""

from __future__ import annotations

import io
import json
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from experiments.contracts import Photographs

Splits = dict[str, dict[str, list[str]]]


def colour(name: str, index: int) -> tuple[int, int, int]:
    """The colour of image `index` of class `name`."""
    code = zlib.crc32(f"{name}/{index}".encode())
    return code & 255, code >> 8 & 255, code >> 16 & 255


def image(name: str, index: int, size: tuple[int, int]) -> Image.Image:
    """An image of one colour; size is (width, height)."""
    return Image.new("RGB", size, colour(name, index))


def pixels(name: str, index: int, size: int) -> np.ndarray:
    """The same as an array."""
    return np.asarray(image(name, index, (size, size)))


def png(name: str, index: int, size: tuple[int, int]) -> bytes:
    """The same as a PNG."""
    buffer = io.BytesIO()
    image(name, index, size).save(buffer, "PNG")
    return buffer.getvalue()


def decode(content: bytes) -> np.ndarray:
    """The pixels of an encoded image."""
    return np.asarray(Image.open(io.BytesIO(content)))


def whole_images(images: Photographs) -> list[np.ndarray]:
    """Every photograph by itself, in its own size and orientation."""
    found = []
    for pixels, (height, width) in zip(images.pixels, images.sizes, strict=True):
        shorter, longer = sorted((height, width))
        assert not pixels[shorter:].any()
        assert not pixels[:, longer:].any()
        pixels = pixels[:shorter, :longer]
        found.append(pixels.swapaxes(0, 1) if height > width else pixels)
    return found


def check_colours(images: Any, colours: list[tuple[int, int, int]], exact: bool) -> None:
    """Checks that every image, of whatever size, has its colour in every pixel."""
    images = images[:]
    if isinstance(images, Photographs):
        images = whole_images(images)
    for image, wanted in zip(images, colours, strict=True):
        error = np.abs(np.asarray(image, int) - wanted)
        assert error.max() <= (0 if exact else 3)


def write_image(path: Path, name: str, index: int, size: tuple[int, int] = (120, 100)) -> None:
    """The same as a file; JPEG has no chroma loss on one colour but for a rounding or two."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = image(name, index, size)
    if path.suffix == ".png":
        picture.save(path)
    else:
        picture.save(path, quality=100, subsampling=0)


def write_pickle(path: Path, value: object, protocol: int = 2) -> None:
    """A pickle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(value, protocol=protocol))


@dataclass(frozen=True)
class Expected:
    """What a data set made from a fake archive must hold."""

    splits: dict[str, dict[str, list[tuple[int, int, int]]]]
    """For every split and class the colours of the images."""
    exact: bool = True
    """Whether the pixels came without loss."""


def _expect(classes: dict[str, dict[str, int]], exact: bool = True) -> Expected:
    return Expected(
        {
            split: {
                name: [colour(name, i) for i in range(count)] for name, count in sorted(of.items())
            }
            for split, of in classes.items()
        },
        exact,
    )


_MINI = {
    "base": {"n02108551": 3, "n01532829": 2},
    "validation": {"n02950826": 2},
    "novel": {"n01930112": 2, "n07613480": 1},
}


def mini_imagenet_folder(manual_dir: Path) -> Expected:
    """`mini-imagenet/images/*.jpg` and the lists of Ravi and Larochelle."""
    folder = manual_dir / "mini-imagenet"
    for split, part in (("base", "train"), ("validation", "val"), ("novel", "test")):
        lines = ["filename,label"]
        for name, count in _MINI[split].items():
            for i in range(count):
                write_image(folder / "images" / f"{name}{i:08}.jpg", name, i)
                lines.append(f"{name}{i:08}.jpg,{name}")
        (folder / f"{part}.csv").write_text("\n".join(lines) + "\n")
    return _expect(_MINI, exact=False)


def mini_imagenet_caches(manual_dir: Path) -> Expected:
    """`mini-imagenet-cache-*.pkl`."""
    for split, part in (("base", "train"), ("validation", "val"), ("novel", "test")):
        data, rows = [], {}
        for name, count in _MINI[split].items():
            rows[name] = list(range(len(data), len(data) + count))
            data += [pixels(name, i, 84) for i in range(count)]
        write_pickle(
            manual_dir / f"mini-imagenet-cache-{part}.pkl",
            {"image_data": np.stack(data), "class_dict": rows},
        )
    return _expect(_MINI)


def mini_imagenet_phases(manual_dir: Path) -> Expected:
    """`miniImageNet_category_split_*.pickle`."""
    first = 0
    for split, part in (
        ("base", "train_phase_train"),
        ("validation", "val"),
        ("novel", "test"),
    ):
        numbers = {name: first + i for i, name in enumerate(_MINI[split])}
        first += len(numbers)
        items = [(name, i) for name, count in _MINI[split].items() for i in range(count)]
        write_pickle(
            manual_dir / "mini_imagenet" / f"miniImageNet_category_split_{part}.pickle",
            {
                "data": np.stack([pixels(name, i, 84) for name, i in items]),
                "labels": [numbers[name] for name, _ in items],
                "catname2label": numbers,
            },
            protocol=4,
        )
    return _expect(_MINI)


def tiered_imagenet(manual_dir: Path) -> Expected:
    """The pickles of Ren et al.; "crane" is a bird in one split and a machine in another."""
    classes = {
        "base": {"Yorkshire terrier": 3, "crane": 2},
        "validation": {"ladle": 2},
        "novel": {"crane": 2, "teapot": 1},
    }
    expected: dict = {}
    for split, part in (("base", "train"), ("validation", "val"), ("novel", "test")):
        names = list(classes[split])
        items = [
            (f"{split}/{name}", label, i)
            for label, name in enumerate(names)
            for i in range(classes[split][name])
        ]
        # As cv2.imencode returns it.
        encoded = [
            np.frombuffer(png(key, i, (84, 84)), np.uint8)[:, None].copy() for key, _, i in items
        ]
        folder = manual_dir / "tiered-imagenet"
        write_pickle(folder / f"{part}_images_png.pkl", encoded)
        labels = np.array([label for _, label, _ in items], np.int32)
        write_pickle(
            folder / f"{part}_labels.pkl",
            {
                "label_specific": labels,
                "label_general": np.zeros_like(labels),
                "label_specific_str": names,
                "label_general_str": ["thing"],
            },
        )
        expected[split] = {
            name if name != "crane" else f"crane ({split} {label})": [
                colour(f"{split}/{name}", i) for i in range(classes[split][name])
            ]
            for label, name in enumerate(names)
        }
    return Expected({s: dict(sorted(of.items())) for s, of in expected.items()})


_BIRDS = {f"{i + 1:03}.Bird_{'abcdefgh'[i]}": 2 + i % 2 for i in range(8)}


def _birds(indices: dict[str, tuple[int, ...]]) -> dict[str, dict[str, int]]:
    names = list(_BIRDS)
    return {split: {names[i]: _BIRDS[names[i]] for i in which} for split, which in indices.items()}


def cub_folder(manual_dir: Path) -> Expected:
    """`CUB_200_2011/images` alone: the split goes by the class number."""
    for name, count in _BIRDS.items():
        for i in range(count):
            write_image(
                manual_dir / "CUB_200_2011/images" / name / f"{name[4:]}_{i:04}.jpg", name, i
            )
    return _expect(
        _birds({"base": (0, 2, 4, 6), "validation": (1, 5), "novel": (3, 7)}), exact=False
    )


def cub_archive(manual_dir: Path) -> Expected:
    """`CUB_200_2011.tgz` and the lists of Chen et al., with the paths of their machine."""
    manual_dir.mkdir(parents=True, exist_ok=True)
    with tarfile.open(manual_dir / "CUB_200_2011.tgz", "w:gz") as archive:
        add(archive, "attributes.txt", b"1 has_bill_shape::curved")
        add(archive, "CUB_200_2011/classes.txt", b"1 001.Bird_a")
        for name, count in _BIRDS.items():
            for i in range(count):
                content = png(name, i, (120, 100))
                add(archive, f"CUB_200_2011/images/{name}/{name[4:]}_{i:04}.png", content)
    split = {"base": (0, 1, 2, 3), "validation": (4, 5), "novel": (6, 7)}
    names = list(_BIRDS)
    for key, file in (("base", "base"), ("validation", "val"), ("novel", "novel")):
        items = [(label, i) for label in split[key] for i in range(_BIRDS[names[label]])]
        content = {
            "label_names": names,
            "image_names": [
                f"/home/someone/filelists/CUB/CUB_200_2011/images/{names[label]}/"
                f"{names[label][4:]}_{i:04}.png"
                for label, i in items
            ],
            "image_labels": [label for label, _ in items],
        }
        (manual_dir / f"{file}.json").write_text(json.dumps(content))
    return _expect(_birds(split))


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """One file into a tar."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


_CIFAR = {
    "base": {"apple": 3, "maple_tree": 2},
    "validation": {"otter": 2},
    "novel": {"baby": 2, "worm": 1},
}
_PARTS = {"base": "train", "validation": "val", "novel": "test"}


def cifar_fs_folder(manual_dir: Path) -> Expected:
    """`cifar100/data/*/*.png` and the lists of Bertinetto et al."""
    folder = manual_dir / "cifar100"
    for split, part in _PARTS.items():
        for name, count in _CIFAR[split].items():
            for i in range(count):
                write_image(folder / "data" / name / f"{name}_s_{i:06}.png", name, i, (32, 32))
        path = folder / "splits" / "bertinetto" / f"{part}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(_CIFAR[split]) + "\n")
    return _expect(_CIFAR)


def cifar_fs_archive(manual_dir: Path) -> Expected:
    """The same as `cifar100.zip`."""
    elsewhere = manual_dir / "elsewhere"
    expected = cifar_fs_folder(elsewhere)
    zip_folder(elsewhere, manual_dir / "cifar100.zip")
    return expected


def cifar_fs_pickles(manual_dir: Path) -> Expected:
    """The pickles of MetaOptNet, which number the classes."""
    expected: dict = {}
    for split, part in _PARTS.items():
        labels = list(range(10, 10 + len(_CIFAR[split])))
        names = [f"{split} class {label:03}" for label in labels]
        counts = list(_CIFAR[split].values())
        items = [
            (n, label, i)
            for n, label, c in zip(names, labels, counts, strict=True)
            for i in range(c)
        ]
        items = items[::-1]
        write_pickle(
            manual_dir / "cifar-fs" / f"CIFAR_FS_{part}.pickle",
            {
                "data": np.stack([pixels(name, i, 32) for name, _, i in items]),
                "labels": [label for _, label, _ in items],
            },
        )
        expected[split] = {
            n: [colour(n, i) for i in reversed(range(c))]
            for n, c in zip(names, counts, strict=True)
        }
    return Expected(expected)


def cifar_fs_zipped_pickles(manual_dir: Path) -> Expected:
    """The same as `CIFAR-FS.zip`."""
    elsewhere = manual_dir / "elsewhere"
    expected = cifar_fs_pickles(elsewhere)
    zip_folder(elsewhere, manual_dir / "CIFAR-FS.zip")
    return expected


def zip_of_nothing(folder: Path) -> Path:
    """A zip that holds no data set."""
    path = folder / "nothing.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", b"nothing")
    return path


def zip_folder(folder: Path, path: Path) -> None:
    """All files below a folder."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            archive.write(file, file.relative_to(folder))


_SPECIES = {
    "base": {"Danaus plexippus": 3, "Cygnus olor": 2},
    "novel": {"Sciurus carolinensis": 2, "Bufo bufo": 1},
}
_SUPER = {
    "Danaus plexippus": ("Insecta", 11),
    "Cygnus olor": ("Aves", 7),
    "Sciurus carolinensis": ("Mammalia", 30),
    "Bufo bufo": ("Amphibia", 2),
}


def _species_files() -> dict[str, tuple[str, int]]:
    return {
        f"train_val_images/{_SUPER[name][0]}/{name}/{i:032x}.jpg": (name, i)
        for of in _SPECIES.values()
        for name, count in of.items()
        for i in range(count)
    }


def _boxes() -> dict:
    """Two boxes on every image, but none on an image of Cygnus olor that is not in `_SPECIES`."""
    files = list(_species_files().items())
    extra = "train_val_images/Aves/Cygnus olor/" + "f" * 32 + ".jpg"
    return {
        "images": [{"id": 100 + i, "file_name": file} for i, (file, _) in enumerate(files)]
        + [{"id": 99, "file_name": extra}],
        "annotations": [
            {
                "id": 2 * i + k,
                "image_id": 100 + i,
                "category_id": _SUPER[name][1],
                "bbox": [0, 0, 5, 5],
            }
            for i, (_, (name, _)) in enumerate(files)
            for k in range(2)
        ],
        "categories": [
            {"id": number, "name": name, "supercategory": above}
            for name, (above, number) in _SUPER.items()
        ],
    }


def write_torch_list(path: Path, values: list, zipped: bool = True) -> None:
    """A list as `torch.save` writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not zipped:
        parts = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, values, [])
        path.write_bytes(b"".join(pickle.dumps(part, protocol=2) for part in parts))
        return
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{path.stem}/data.pkl", pickle.dumps(values, protocol=2))
        archive.writestr(f"{path.stem}/version", b"3\n")


def inat2017_boxes(manual_dir: Path) -> Expected:
    """The competition's images and boxes, and the category lists of FRN."""
    folder = manual_dir / "inat2017"
    for file, (name, i) in _species_files().items():
        write_image(folder / file, name, i)
    write_image(folder / f"train_val_images/Aves/Cygnus olor/{'f' * 32}.jpg", "no box", 0)
    (folder / "train_2017_bboxes.json").write_text(json.dumps(_boxes()))
    for split, part in (("base", "train"), ("novel", "test")):
        write_torch_list(
            folder / f"meta_iNat_{part}cats.pth",
            [_SUPER[name][1] for name in _SPECIES[split]],
            zipped=split == "base",
        )
    return _expect(_SPECIES, exact=False)


def inat2017_archive(manual_dir: Path) -> Expected:
    """The competition's archives, and a split by the names of the species."""
    manual_dir.mkdir(parents=True, exist_ok=True)
    with tarfile.open(manual_dir / "train_val_images.tar.gz", "w:gz") as archive:
        for file, (name, i) in _species_files().items():
            add(archive, f"./{file}", png(name, i, (100, 90)))
        add(archive, f"./train_val_images/Aves/Cygnus olor/{'f' * 32}.jpg", b"no image, no box")
        add(archive, "./train_val_images/Aves/Gavia immer/1.jpg", b"not in the split")
    with zipfile.ZipFile(manual_dir / "train_2017_bboxes.zip", "w") as archive:
        archive.writestr("train_2017_bboxes.json", json.dumps(_boxes()))
    _write_species_split(manual_dir)
    return _expect(_SPECIES)


def inat2017_folder(manual_dir: Path) -> Expected:
    """Image folders, and a split by the names of the species."""
    for file, (name, i) in _species_files().items():
        write_image(manual_dir / file, name, i)
    _write_species_split(manual_dir)
    return _expect(_SPECIES, exact=False)


def _write_species_split(folder: Path) -> None:
    content = {split: list(of) for split, of in _SPECIES.items()}
    (folder / "inat2017_fewshot_split.json").write_text(json.dumps(content))


def inat2017_prepared(manual_dir: Path) -> Expected:
    """`meta_iNat/train/*/*.png`, as FRN's script leaves it."""
    numbered = {
        split: {str(_SUPER[name][1]): count for name, count in of.items()}
        for split, of in _SPECIES.items()
    }
    for split, part in (("base", "train"), ("novel", "test")):
        for name, count in numbered[split].items():
            for i in range(count):
                path = manual_dir / "meta_iNat" / part / name / f"{i:032x}.png"
                write_image(path, name, i, (84, 84))
    return _expect(numbered)


LAYOUTS: dict[str, tuple[Callable[[Path], Expected], ...]] = {
    "mini_imagenet": (mini_imagenet_folder, mini_imagenet_caches, mini_imagenet_phases),
    "tiered_imagenet": (tiered_imagenet,),
    "cub_fewshot": (cub_folder, cub_archive),
    "cifar_fs": (cifar_fs_folder, cifar_fs_archive, cifar_fs_pickles, cifar_fs_zipped_pickles),
    "inat2017_fewshot": (inat2017_boxes, inat2017_archive, inat2017_folder, inat2017_prepared),
}
"""Every data set with the functions that write a fake of it."""
