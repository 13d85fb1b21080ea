"""The wheel and the source archive, installed into a fresh environment and used there."""

import json
import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "--data",
    "synthetic",
    "--train-size",
    "32",
    "--val-size",
    "16",
    "--image-size",
    "8",
    "--max-steps",
    "2",
]
TINY += ["--batch-size", "16", "--arch", "mlp", "--device", "cpu", "--no-progress"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the source archive of the sources that git tracks."""
    pytest.importorskip("setuptools")
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    to = ["--dist-dir", str(made)]
    words = [sys.executable, "setup.py", "-q", "bdist_wheel", *to, "sdist", "--formats", "tar", *to]
    subprocess.run(words, cwd=source, capture_output=True, check=True)
    return made


@pytest.fixture(scope="module")
def ampcompare(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a new environment with the wheel; its requirements come from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = archives.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    python = folder / "env" / "bin" / "python"
    words = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*words, "--ignore-installed", wheel], check=True, capture_output=True)
    # Appended, so that an editable link to the checkout in these folders comes after the wheel.
    paths = [path for path in [*site.getsitepackages(), *sys.path] if path.endswith("site-packages")]
    (packages / "requirements.pth").write_text(f"import sys; sys.path.extend({paths!r})\n")
    return folder / "env" / "bin" / "ampcompare"


def call(ampcompare: Path, *words: str) -> str:
    """Run the installed command in its folder, without this checkout on the path, and return stdout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(ampcompare.with_name("python")), str(ampcompare), *words],
        cwd=ampcompare.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_recipes_data_and_templates(ampcompare: Path) -> None:
    """Recipes and the example table of `judge` are in the wheel."""
    assert "digits" in call(ampcompare, "list", "recipes")
    assert "apex:O1" in call(ampcompare, "judge", "--example")
    where = call(ampcompare, "config", "schema")
    assert json.loads(where)["title"] == "ampcompare settings"


@pytest.mark.extended
def test_the_wheel_trains_and_reports(ampcompare: Path) -> None:
    """A comparison runs from the wheel, and its page has its templates."""
    call(ampcompare, "compare", "--arm", "fp32,O2", "--seeds", "0", *TINY, "-o", "out")
    assert "apex:O2" in call(ampcompare, "report", "out")
    page = ampcompare.parent / "out" / "report.html"
    pytest.importorskip("jinja2")
    assert "<style>" in page.read_text(encoding="utf-8")
    package = subprocess.run(
        [str(ampcompare.with_name("python")), "-P", "-c", "import ampcompare; print(ampcompare.__file__)"],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=ampcompare.parent,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "/env/lib/" in package


def test_the_source_archive_can_be_tested(archives: Path) -> None:
    """The source archive holds the tests with their data, the constraints and the scripts."""
    (path,) = archives.glob("*.tar")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "constraints/cpu.txt", "scripts/test", "tests/conftest.py", "docs/index.md"} <= names
    assert any(name.startswith("tests/apex/golden/") for name in names)
