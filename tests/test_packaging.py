"""What `pip install` of the checkout puts into an environment."""

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (path,) = folder.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_the_library_alone(wheel):
    names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    modules = {f"jaxloss/{path.name}" for path in (ROOT / "jaxloss").glob("*.py")}
    assert set(names) == modules | {"jaxloss/py.typed"}


def test_the_wheel_needs_little(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    needed = [item for item in metadata.get_all("Requires-Dist", []) if "extra ==" not in item]
    assert {item.split(">=")[0] for item in needed} == {"jax", "optax", "jaxtyping"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_the_library_imports_no_more_than_it_needs():
    """In a fresh interpreter, so that nothing that the tests import counts."""
    code = (
        "import sys, jaxloss; "
        "print([m for m in ('flax', 'orbax', 'tensorflow', 'torch', 'experiments') "
        "if m in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"
