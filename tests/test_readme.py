"""The documents are true: the README's example runs, and all commands, presets and sets exist."""

import importlib
import importlib.util
import io
import json
import re
import shlex
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
import torch
from PIL import Image

import jaxloss
from experiments.cli.main import parse
from experiments.data.pipeline import load_split
from experiments.datasets import DATASETS, lookup
from experiments.papers.presets import PRESETS
from tests.experiments import fake_image_sets
from tests.experiments.fake_archives import check_colours
from tests.tolerances import FLOAT32

ROOT = Path(__file__).parents[1]
MANUAL = (ROOT / "experiments/README.md").read_text(encoding="utf-8")


COMPARISONS = (
    "docs/coming_from.md",
    "docs/coming_from_others.md",
    "docs/recipes/pytorch.md",
)
IN_OTHER_TESTS = (
    *("docs/adding_a_data_set.md", "docs/adding_a_loss.md"),
    *("docs/devices.md", "docs/recipes/batches.md"),
)


def run_blocks(page: str, without: str | None = None) -> dict[str, Any]:
    """Runs the Python and the cells of a page, but for blocks with a word, and returns its names.

    All blocks share their names; a line in a traceback is that of the document.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "page"}
    for block in re.finditer(r"```(?:python|{code-cell})\n(.*?)```", text, flags=re.DOTALL):
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        if without is None or without not in source:
            exec(compile(source, page, "exec"), names)
    return names


def test_the_example_prints_what_it_says(capsys):
    run_blocks("README.md")
    start, end = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert start < 0.2
    assert end > 0.95


@pytest.mark.long
def test_the_training_steps_on_several_devices_run(capsys):
    run_blocks("docs/devices.md")
    on_one, on_mesh, on_auto_axes, *others = map(float, capsys.readouterr().out.split())
    assert [on_mesh, on_auto_axes] == pytest.approx([on_one] * 2, rel=4 * FLOAT32)
    assert len(others) == 2
    assert np.isfinite(others).all()


@pytest.mark.long
@pytest.mark.parametrize("page", COMPARISONS)
def test_the_comparisons_with_other_packages_run(page):
    package = "pytorch_metric_learning"
    without = None if importlib.util.find_spec(package) else package
    run_blocks(page, without)


class TinyImages(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """32 images of 8 classes, in the features of CIFAR-10; the first pixel counts the images."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(32, 32, 3)),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(32):
            image = np.full((32, 32, 3), np.arange(32)[:, None], np.uint8)
            image[0, 0] = i
            png = io.BytesIO()
            Image.fromarray(image).save(png, format="png")
            png.seek(0)
            yield i, {"image": png, "label": i % 8}


@pytest.mark.long
def test_the_batches_of_tfds_and_grain(tmp_path, monkeypatch):
    builder = TinyImages(data_dir=tmp_path, file_format="array_record")
    builder.download_and_prepare()

    def data_source(name, **options):
        assert name == "cifar10"
        return builder.as_data_source(**options)

    monkeypatch.setattr(tfds, "data_source", data_source)
    names = run_blocks("docs/recipes/batches.md")
    assert sorted(names["source_labels"]) == sorted(np.arange(32) % 8)
    batch = names["read"](3)
    classes, counts = np.unique(batch["label"], return_counts=True)
    assert len(classes) == 4
    assert (counts == 2).all()
    found = batch["image"][:, 0, 0, 0]
    assert len(set(found)) == 8
    np.testing.assert_array_equal(found % 8, batch["label"])


def test_every_code_block_of_the_site_runs():
    """In the build of the site, which runs the pages with this head, or in a test of this file."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts]
    assert len(pages) > 20
    for path in pages:
        text = path.read_text(encoding="utf-8")
        if path.relative_to(ROOT).as_posix() not in (*COMPARISONS, *IN_OTHER_TESTS):
            assert "```python" not in text, path
        if "```{code-cell}" in text:
            assert text.startswith("---\nfile_format: mystnb\n"), path


NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def read_cells(path: Path) -> list[tuple[dict[str, Any], str]]:
    """The cells of a notebook with their texts."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [(cell, "".join(cell["source"])) for cell in notebook["cells"]]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_opens_in_colab(path):
    """It is stored without outputs; its links lead to it and to pages of the site."""
    cells = read_cells(path)
    code = [(cell, text) for cell, text in cells if cell["cell_type"] == "code"]
    for cell, _ in code:
        assert not cell["outputs"]
        assert cell["execution_count"] is None
    blob = "https://colab.research.google.com/github/jaxloss/jaxloss/blob/main/"
    assert f"[Open in Colab]({blob}{path.relative_to(ROOT).as_posix()})" in cells[0][1]
    first, *others = (text for _, text in code)
    assert first.startswith('import sys\n\nif "google.colab" in sys.modules:\n')
    assert "%pip install -q" in first
    # No upgrade, and no extra but that of the experiments: pip keeps a JAX that is new enough.
    assert not re.search(r"-U|upgrade|==", first)
    extras = ["experiments"] if any("import experiments" in text for text in others) else []
    assert re.findall(r"\[(\w+)\]", first) == extras
    assert not any(re.search(r"^ *[%!]", text, flags=re.MULTILINE) for text in others)
    site = "https://jaxloss.github.io/jaxloss/"
    pages = re.findall(rf"\({site}(.*?)\)", "".join(text for _, text in cells))
    assert pages
    for page in pages:
        documents = [ROOT / "docs" / page.replace(".html", end) for end in (".md", ".ipynb")]
        assert any(map(Path.is_file, documents)) or page == "auto_gallery/index.html"


@pytest.mark.parametrize(
    ("heading", "column", "known"),
    [("| protocol | presets |", 2, PRESETS), ("| task | data sets |", 2, DATASETS)],
    ids=["presets", "sets"],
)
def test_every_name_is_in_its_table(heading, column, known):
    rows = MANUAL.partition(heading)[2].partition("\n\n")[0].splitlines()
    cells = [row.split("|")[column] for row in rows if row.count("|") > 2]
    named = {name for cell in cells for name in re.findall(r"`([a-z0-9_-]+)`", cell)}
    assert named - {"linear"} == set(known)


SEARCHED = """ArcFace, CosFace, NT-Xent, SimCLR, CLIP, SigLIP, balanced softmax, logit adjustment,
DCL, GIST, GradCache, LeJEPA, DINO, BYOL, ColBERT, own images, hard negatives"""


def test_the_search_of_the_site_finds_names_first():
    """Main entries of the index come before titles and texts."""
    text = (ROOT / "docs/known_as.md").read_text(encoding="utf-8")
    entries = set(re.findall(r"{index}`!(.*?)`", text))
    assert set(re.split(r",\s", SEARCHED)) <= entries


def test_the_table_of_losses_names_every_one():
    text = (ROOT / "docs/losses/index.md").read_text(encoding="utf-8")
    table = text.partition("## All losses")[2]
    losses = {name for name in jaxloss.__all__ if name.endswith("_loss")} - {"sharded_loss"}
    assert losses <= set(re.findall(r"`(\w+)`", table))


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "experiments/README.md",
        pytest.param("experiments/RESULTS_APPENDIX.md", marks=pytest.mark.long),
    ],
)
def test_every_command_parses(document):
    text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
    text = text.replace("BUCKET", "bucket")
    commands = re.findall(r"python -m experiments ([^`\n#]*)", text)
    assert len(commands) > (
        5 if document in ("experiments/README.md", "experiments/RESULTS_APPENDIX.md") else 0
    )
    for command in commands:
        parse([word for word in shlex.split(command) if word != "--help"])


@pytest.mark.parametrize("name", ["focal_loss", "lifted_loss"])
def test_the_code_of_adding_a_loss_runs(name, monkeypatch):
    """Each block in the file that is named above it; then the new loss equals its references."""
    text = (ROOT / "docs/adding_a_loss.md").read_text(encoding="utf-8")
    found = re.findall(r"\*\*`([\w/]+)\.py`\*\*|\n\n   ```python\n(.*?)```", text, re.DOTALL)
    blocks, path = [], ""
    for file, source in found:
        path = file or path
        if name in source or f'"{name.removesuffix("_loss")}"' in source:
            blocks.append((path, source))
    assert len(blocks) == 4
    row: Any = None
    for path, block in blocks:
        module, source = importlib.import_module(path.replace("/", ".")), textwrap.dedent(block)
        names = dict(vars(module))
        if source.startswith("loss_row"):
            row = eval(source, names)
            continue
        exec(compile(source, path, "exec"), names)
        monkeypatch.setattr(module, name, names[name], raising=False)
        if path.startswith("jaxloss"):
            monkeypatch.setattr(jaxloss, name, names[name], raising=False)
    arguments = row.make_inputs(np.random.default_rng(0), 6, np.float32)
    found = float(row.function(*arguments))
    assert found == pytest.approx(float(row.reference(*arguments)), rel=4 * FLOAT32)
    logits, labels = map(torch.tensor, arguments)
    assert found == pytest.approx(
        float(row.torch_reference(logits, labels.long())), rel=4 * FLOAT32
    )


def test_the_code_of_adding_a_data_set_runs(monkeypatch, tmp_path):
    """What the fake files hold is what the data set has."""
    text = (ROOT / "docs/adding_a_data_set.md").read_text(encoding="utf-8")
    builder, fake = re.findall(r"\n\n   ```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {"__name__": "experiments.datasets.leaves"}
    exec(compile(textwrap.dedent(builder), "leaves.py", "exec"), names)
    (dataset,) = names["DATASETS"]
    monkeypatch.setitem(DATASETS, "leaves", dataset)
    written = dict(vars(fake_image_sets))
    exec(compile(textwrap.dedent(fake), "fake_image_sets.py", "exec"), written)
    expected = written["leaves"](tmp_path / "manual")
    assert [*expected] == [*dataset.classes]
    for split, of in expected.items():
        found = load_split(
            "leaves@16", split, data_dir=tmp_path / "data", manual_dir=tmp_path / "manual"
        )
        assert found.class_names == of.class_names
        np.testing.assert_array_equal(found.labels, of.labels)
        check_colours(found.images, of.images, exact=lookup("leaves@16").encoding == "png")
