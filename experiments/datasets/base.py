"""What a data set is: its name, its splits, and the layouts in which people have its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.datasets.archives import MissingArchiveError, reading
from experiments.datasets.images import LONGEST, Encoding, SourceImage, encode
from experiments.datasets.layouts import Layout, SearchPath, class_folders


@dataclass(frozen=True)
class Dataset:
    """What is known of a data set before it is prepared, and how its files are read."""

    name: str
    """Of the folder of the prepared data: letters, digits and underscores."""
    description: str
    """One line."""
    classes: dict[str, int]
    """The published number of classes in every split: `base`, `validation` (optional) and `novel`,
    which hold classes out, of a few-shot set; else `train` and others with the same classes."""
    layouts: tuple[Layout, ...]
    """The first one of which all files exist is read."""
    image_shape: tuple[int, int, int]
    """Height, width and channels of the stored images. Of `whole` ones, both are the largest
    length of the shorter side."""
    source: str = ""
    """Who published it, and where."""
    multi_label: bool = False
    """Whether an image can have any number of labels; the splits then share the labels."""
    images_of: str = ""
    """The data set with the same images, in other splits. Default: none but itself."""
    resizable: bool = False
    """Whether the images can be stored at another size."""
    whole: bool = False
    """Whether the images have different sizes and are stored uncropped: see `encode`."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """Of the pixel values in [0, 1] of every channel, where they are measured."""
    version: str = "1.0.0"
    """Of what is stored. A higher one where the same files would now give other images or classes;
    what earlier versions prepared is refused."""
    encoding: Encoding = "png"
    """How images are stored: lossless, or as JPEG with a third of the bytes."""
    background: str = "white"
    bits: int = 16
    """As in `encode`."""
    folders: tuple[str, ...] = (".",)
    """Where the files may be: names of the data set's own folder in the manual directory, `.` for
    that directory itself, or an absolute path, where a package of the system has the files."""
    argument: str = ""
    """The name on the command line, where that is another one."""
    own: bool = False
    """Whether it is a folder of one's own."""
    remarks: tuple[str, ...] = ()
    """What is odd in the data, for the log and the report of a run."""
    details: tuple[str, ...] = ()
    """Further lines for `datasets NAME`."""
    verify: Callable[[], None] = lambda: None
    """Raises a `DamagedArchiveError` if the files are no longer those that were read before."""
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of a folder of one's own: the path of every image, by split, in the order of the records."""

    @property
    def few_shot(self) -> bool:
        """Whether the splits hold classes out."""
        return "novel" in self.classes

    @property
    def array_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an array that holds any of the images."""
        height, width, channels = self.image_shape
        return height, LONGEST * width if self.whole else width, channels

    def encode(self, image: SourceImage) -> bytes:
        """An image as the data set stores it."""
        how = {option: vars(self)[option] for option in ("whole", "encoding", "background", "bits")}
        return encode(image, self.image_shape, **how)

    def search_path(self, manual_dir: Path, scratch: Path = Path()) -> SearchPath:
        """The folders in which the files are looked up, below that of downloaded archives."""
        return SearchPath(tuple(manual_dir / name for name in self.folders), scratch)

    def layout(self, search_path: SearchPath) -> Layout:
        """The first layout whose files all exist, unread.

        Raises:
          MissingArchiveError: No layout is complete. The message lists the files and folders.
        """
        partial = []
        for layout in self.layouts:
            missing = layout.missing(search_path)
            if not missing:
                return layout
            if len(missing) < len(layout.needs):
                partial.append(f"Missing for {layout.title}: {'; '.join(missing)}.")
        where = " or ".join(map(str, search_path.folders))
        lines = [f"{self.name} is not prepared. It needs one of the following, in {where}:"]
        lines += [f"- {layout.describe()}" for layout in self.layouts]
        raise MissingArchiveError("\n".join(lines + partial))

    def read(self, search_path: SearchPath) -> Mapping[str, Any]:
        """The images of every split, from the first complete layout."""
        layout, folders = self.layout(search_path), " or ".join(map(str, search_path.folders))
        with reading(f"{self.name} in {folders}", "data set"):
            return layout.read(search_path)


def photographs(*, test_folders: tuple[str, ...] = (), **more: Any) -> Dataset:
    """A data set of photographs of any size, stored whole.

    With one class each and the same classes in all splits, they may also be in `class_folders`, of
    which `test_folders` are possible names of that for test.
    """
    options: dict[str, Any] = {"image_shape": (256, 256, 3), "resizable": True, "whole": True}
    options |= {"version": "4.0.0", "encoding": "jpeg"} | more
    classes, folders = options["classes"], options["folders"]
    if "train" in classes and not options.get("multi_label"):
        parts = {"train": ("train",), "test": test_folders or ("test", "val")}
        if "validation" in classes:
            parts = parts | {"validation": ("val", "valid", "validation"), "test": ("test",)}
        own = [name for name in folders if name != "."] if "." in folders else ["."]
        options["layouts"] += (class_folders(own, {split: parts[split] for split in classes}),)
    return Dataset(**options)
