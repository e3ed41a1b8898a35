"""CIFAR-FS: the 100 classes of CIFAR-100, of which 64 are base classes."""

from __future__ import annotations

from pathlib import Path

from experiments.data.builders.archives import DamagedArchiveError
from experiments.data.builders.base import DatasetSpec
from experiments.data.builders.images import ClassSplit, list_folders, list_images, split_of_files
from experiments.data.builders.layouts import FEW_SHOT_PARTS, Layout, SearchPath, labelled_pickles
from experiments.data.builders.readers import column, read_lines
from experiments.data.builders.tasks import FewShotBuilder

_PICKLES = {split: f"CIFAR_FS_{part}.pickle" for split, part in FEW_SHOT_PARTS.items()}
_LISTS = {split: f"cifar100/splits/bertinetto/{part}.txt" for split, part in FEW_SHOT_PARTS.items()}
_ARCHIVES = ("cifar100.zip", "cifar-fs.zip", "CIFAR-FS.zip")


def _read_folder(search_path: SearchPath) -> dict[str, ClassSplit]:
    images = search_path.get("cifar100/data")
    return {split: _read_list(search_path.get(name), images) for split, name in _LISTS.items()}


def _read_list(path: Path, images: Path) -> ClassSplit:
    lines = [line.strip() for line in read_lines(path)]
    names = column([name for name in lines if name], Path, path)
    return split_of_files({name: list_images(images / name) for name in names}, path)


def _read_archive(search_path: SearchPath) -> dict[str, ClassSplit]:
    archive = search_path.get(*_ARCHIVES)
    top = search_path.extract(archive)
    inside = SearchPath((top, *list_folders(top)), search_path.scratch)
    for layout in (_FOLDER, _THREE_PICKLES):
        if all(inside.find(*names) for names in layout.needs):
            return dict(layout.read(inside))
    raise DamagedArchiveError(
        f"{archive} contains neither {_FOLDER.title} nor {_THREE_PICKLES.title}"
    )


_FOLDER = Layout(
    "images and the lists of Bertinetto et al.",
    (("cifar100/data",), *((name,) for name in _LISTS.values())),
    _read_folder,
)
_THREE_PICKLES = labelled_pickles("pickles of MetaOptNet", _PICKLES)


class CifarFs(FewShotBuilder):
    """CIFAR-100 in the split of Bertinetto et al., 32×32."""

    name = "cifar_fs"
    SPEC = DatasetSpec(
        description="60,000 photographs of the 100 classes of CIFAR-100, 32×32",
        image_shape=(32, 32, 3),
        classes={"base": 64, "validation": 16, "novel": 20},
        homepage="https://github.com/bertinetto/r2d2",
        citation=(
            "Bertinetto et al.: Meta-learning with differentiable closed-form solvers. ICLR 2019."
        ),
        version="3.0.0",  # As version 4 of photographs.
        folders=("cifar-fs", "cifar_fs", "CIFAR-FS", "."),
        layouts=(
            _FOLDER,
            _THREE_PICKLES,
            Layout("an archive of either", (_ARCHIVES,), _read_archive),
        ),
    )
