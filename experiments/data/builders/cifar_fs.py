"""CIFAR-FS: the 100 classes of CIFAR-100, 64 to learn from."""

from __future__ import annotations

from pathlib import Path

from experiments.data.archives import DamagedArchiveError
from experiments.data.builders.frame import Facts
from experiments.data.builders.kinds import FewShotBuilder
from experiments.data.builders.layouts import Layout, Place
from experiments.data.builders.pictures import (
    Pictures,
    labelled_pickle,
    list_images,
    picture_files,
    read_lines,
)

_SPLITS = {"base": "train", "validation": "val", "novel": "test"}
_PICKLES = {split: f"CIFAR_FS_{part}.pickle" for split, part in _SPLITS.items()}
_LISTS = {split: f"cifar100/splits/bertinetto/{part}.txt" for split, part in _SPLITS.items()}
_ARCHIVES = ("cifar100.zip", "cifar-fs.zip", "CIFAR-FS.zip")


def _read_folder(place: Place) -> dict[str, Pictures]:
    images = place.get("cifar100/data")
    return {split: _read_list(place.get(name), images) for split, name in _LISTS.items()}


def _read_list(path: Path, images: Path) -> Pictures:
    names = [line.strip() for line in read_lines(path)]
    return picture_files({name: list_images(images / name) for name in names if name}, path)


def _read_pickles(place: Place) -> dict[str, Pictures]:
    return {
        split: labelled_pickle(place.get(name), f"{split} class")
        for split, name in _PICKLES.items()
    }


def _read_archive(place: Place) -> dict[str, Pictures]:
    archive = place.get(*_ARCHIVES)
    top = place.extract(archive)
    inside = Place((top, *sorted(path for path in top.iterdir() if path.is_dir())), place.scratch)
    for layout in (_FOLDER, _THREE_PICKLES):
        if all(inside.find(*names) for names in layout.needs):
            return dict(layout.read(inside))
    raise DamagedArchiveError(f"{archive} holds neither {_FOLDER.title} nor {_THREE_PICKLES.title}")


_FOLDER = Layout(
    "images and the lists of Bertinetto et al.",
    (("cifar100/data",), *((name,) for name in _LISTS.values())),
    _read_folder,
)
_THREE_PICKLES = Layout(
    "pickles of MetaOptNet",
    tuple((name,) for name in _PICKLES.values()),
    _read_pickles,
)


class CifarFs(FewShotBuilder):
    """CIFAR-100 in the split of Bertinetto et al., 32×32."""

    name = "cifar_fs"
    FACTS = Facts(
        description="60,000 photographs of the 100 classes of CIFAR-100, 32×32",
        image_shape=(32, 32, 3),
        classes={"base": 64, "validation": 16, "novel": 20},
        homepage="https://github.com/bertinetto/r2d2",
        citation=(
            "Bertinetto et al.: Meta-learning with differentiable closed-form solvers. ICLR 2019."
        ),
        folders=("cifar-fs", "cifar_fs", "CIFAR-FS", "."),
        layouts=(
            _FOLDER,
            _THREE_PICKLES,
            Layout("an archive of either", (_ARCHIVES,), _read_archive),
        ),
    )
