"""What `pip install` of the checkout puts into an environment."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import jaxloss

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The folder of the sdist, and of the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions):
    (path,) = distributions.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_sdist_and_the_wheel_hold_the_library_alone(distributions, wheel):
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxloss").rglob("*.py")}
    modules |= {"jaxloss/py.typed"}
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert set(names) == modules
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    about = {"PKG-INFO", "pyproject.toml", "README.md", "LICENSE", ".gitignore"}
    assert files - {""} == modules | about


def test_workflows_run_what_was_reviewed():
    """Actions of a commit, tools of a version, and no index beside that of PyPI."""
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        for action in re.findall(r"uses: (.*)", text):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action), f"{path}: {action}"
        for tools in re.findall(r"pip install (.*)", text):
            assert all(re.fullmatch(r"[\w-]+==[\d.]+", tool) for tool in tools.split()), path
        assert not re.search("EXTRA_INDEX|extra-index", text), path


def test_the_version_has_one_source():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    found = dict(line.split(": ", 1) for line in citation.splitlines() if ": " in line)
    assert found["version"] == jaxloss.__version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.escape(jaxloss.__version__)
    (released,) = re.findall(rf"(?m)^## \[{version}\](?: – (\d{{4}}-\d\d-\d\d))?$", changes)
    assert found.get("date-released", "") == released


def test_the_wheel_needs_little(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    for minor in (11, 12, 13, 14):
        assert f"Programming Language :: Python :: 3.{minor}" in metadata.get_all("Classifier", [])
    needed = [item for item in metadata.get_all("Requires-Dist", []) if "extra ==" not in item]
    assert {item.split(">=")[0] for item in needed} == {"jax", "optax", "jaxtyping"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_the_recipe_for_conda_has_the_requirements_of_the_project():
    text = (ROOT / "docs/releasing.md").read_text(encoding="utf-8")
    recipe = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    about, needed = project["project"], recipe["requirements"]
    python = "python >=${{ python_min }}"
    assert f">={recipe['context']['python_min']}" == about["requires-python"]
    assert sorted(needed["run"]) == sorted(
        [python, *(item.replace(">=", " >=") for item in about["dependencies"])]
    )
    (backend,) = project["build-system"]["requires"]
    assert backend.replace(">=", " >=") in needed["host"]
    assert recipe["context"]["version"] == jaxloss.__version__
    assert recipe["about"]["license"] == about["license"]


def test_the_library_imports_no_more_than_it_needs():
    """In a fresh interpreter, so that nothing that the tests import counts."""
    others = ("flax", "orbax", "tensorflow", "torch", "chex", "experiments", "jaxloss.testing")
    code = f"import sys, jaxloss; print([m for m in {others} if m in sys.modules])"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"
