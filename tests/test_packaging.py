"""The package as others see it: public names, version, metadata, and what a wheel of it contains."""

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import grimp
import pytest
import setuptools

import ampcompare

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The egg-info folder that setup.py writes."""
    pytest.importorskip("setuptools")
    out = tmp_path_factory.mktemp("egg")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return out / "ampcompare.egg-info"


def test_public_names_resolve() -> None:
    """Every name in `__all__` can be had from the package, and is the object of its home module."""
    assert set(ampcompare.__all__) <= set(dir(ampcompare))
    for name in ampcompare.__all__:
        value = getattr(ampcompare, name)
        home = ampcompare._HOMES.get(name)
        assert home is None or value is getattr(importlib.import_module(home), name), name


def test_public_names_are_pinned() -> None:
    """The names that users may rely on change only together with this test."""
    names = """
        Arm Precision Recipe RunConfig RunRecord StepOutcome StepRecord __version__ compare convert_checkpoint
        diagnose examine_machine exec_script explain_arm export find_batch judge_against judge_table lint_paths
        list_arms list_data list_guards list_launchers list_models list_optimizers list_recipes list_runs list_tasks
        load_comparison log_metric look_ahead make_precision migrate_script profile resolve_config run
    """
    assert ampcompare.__all__ == names.split()


def test_compare_is_a_plain_function(tmp_path: Path, forked_python: Any) -> None:
    """`ampcompare.compare` is the function itself, also after a submodule was imported."""
    script = tmp_path / "script.py"
    script.write_text("import ampcompare.experiment.plan, ampcompare as a; print(type(a.compare), type(a))")
    done = forked_python.run([str(script)], tmp_path, os.environ)
    assert done.stdout == "<class 'function'> <class 'module'>\n", done.stderr


def test_version_has_one_source(metadata: Path) -> None:
    """The metadata carry the version of version.py, and reading it imports nothing."""
    assert f"Version: {ampcompare.__version__}\n" in (metadata / "PKG-INFO").read_text(encoding="utf-8")
    assert re.fullmatch(r"\d+\.\d+\.\d+", ampcompare.__version__)
    assert (
        "import"
        not in (ROOT / "ampcompare" / "base" / "version.py").read_text(encoding="utf-8").split('"""')[2]
    )


def test_requirements_are_lower_bounds(metadata: Path) -> None:
    """Requirements of users have lower bounds only and lack `apex`; pytest, for developers, has an upper bound."""
    text = (metadata / "requires.txt").read_text(encoding="utf-8")
    # a marker is a part of its heading
    lines = [line for line in text.splitlines() if line and line[0] != "["]
    names = {re.match(r"[\w-]+", line).group().lower() for line in lines}  # type: ignore[union-attr]
    assert {
        "torch",
        "torchvision",
        "numpy",
        "scipy",
        "scikit-learn",
        "click",
        "pydantic",
        "safetensors",
    } <= names
    assert "apex" not in names
    assert [line for line in lines if re.search(r"==|<|~=|!=", line)] == ["pytest<9.2,>=8"]


def test_what_is_imported_is_required(metadata: Path) -> None:
    """Each package that a file imports, wherever in it, is a requirement or of an extra, or one of those brings it."""
    text = (metadata / "requires.txt").read_text(encoding="utf-8")
    required = set(re.findall(r"^[\w-]+", text, flags=re.MULTILINE))
    modules = {
        "scikit-learn": "sklearn",
        "PyYAML": "yaml",
        "nvidia-ml-py": "pynvml",
        "mlflow-skinny": "mlflow",
    }
    known = {modules.get(name, name).replace("-", "_") for name in required} | {"PIL", "pydantic_core"}
    graph = grimp.build_graph("ampcompare", include_external_packages=True, cache_dir=None)
    others = {
        name for name in graph.modules if name.partition(".")[0] != "ampcompare"
    } - sys.stdlib_module_names
    assert {"torch", "click", "wandb"} <= others
    assert not {name: graph.find_modules_that_directly_import(name) for name in others - known}


def test_sources_are_packaged(metadata: Path) -> None:
    """Every source file and recipe of the package and the mark of typed packages are in the list of sources."""
    listed = set((metadata / "SOURCES.txt").read_text(encoding="utf-8").split("\n"))
    package = ROOT / "ampcompare"
    wanted = {
        path.relative_to(ROOT).as_posix() for kind in ("*.py", "*.yaml") for path in package.rglob(kind)
    }
    assert wanted | {"ampcompare/py.typed", "LICENSE", "constraints/cpu.txt", "scripts/test"} <= listed


def test_console_script(metadata: Path) -> None:
    """The command `ampcompare` is the command line's `main`."""
    assert "ampcompare = ampcompare.cli:main" in (metadata / "entry_points.txt").read_text(encoding="utf-8")


def test_pins_name_a_pair_that_matches() -> None:
    """The constraints pin torch and torchvision only, to one pair; without a GPU, to a build without CUDA."""
    pins = {}
    for kind in ("cpu", "cuda"):
        lines = (ROOT / "constraints" / f"{kind}.txt").read_text(encoding="utf-8").splitlines()
        pins[kind] = [line for line in lines if not line.startswith("#")]
    torch, torchvision = pins["cuda"]
    assert pins["cpu"] == [
        f'{torch}+cpu; platform_system == "Linux"',
        f'{torch}; platform_system != "Linux"',
        torchvision,
    ]
    assert re.fullmatch(r"torch==2\.\d+\.\d+", torch)
    # torchvision 0.N goes with torch 2.(N - 15).
    assert int(torchvision.split(".")[1]) == int(torch.split(".")[1]) + 15


def test_module_runs_as_a_command() -> None:
    """`python -m ampcompare` is the command line, from a checkout too."""
    done = subprocess.run(
        [sys.executable, "-m", "ampcompare", "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert ampcompare.__version__ in done.stdout


def test_links_of_the_page_of_a_release_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Links and pictures of the README lead into the repository at the tag; addresses, anchors and code stay."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    made = runpy.run_path(str(ROOT / "setup.py"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = made["with_absolute_links"](readme, "https://forge.example/owner/project", "1.2.3")
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    assert len(targets) > 20
    assert [target for target in targets if not re.match("https?://|#", target)] == []
    for kind, path in re.findall(r"forge\.example/owner/project/(blob|raw)/v1\.2\.3/([^)#\s]+)", prose):
        assert (ROOT / path).exists(), path
        assert (kind == "raw") == path.endswith((".svg", ".png"))
    assert re.findall(r"^```.*?^```$", page, flags=re.MULTILINE | re.DOTALL) == re.findall(
        r"^```.*?^```$", readme, flags=re.MULTILINE | re.DOTALL
    )
    nested = made["with_absolute_links"](
        "[![a](docs/a.svg)](docs/a.md) and [text](#here)", "https://f.example", "1"
    )
    assert (
        nested
        == "[![a](https://f.example/raw/v1/docs/a.svg)](https://f.example/blob/v1/docs/a.md) and [text](#here)"
    )


def test_no_address_is_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Project URLs come from the one setting, and there are none while it is empty."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", asked.update)
    made = runpy.run_path(str(ROOT / "setup.py"))
    assert bool(asked["project_urls"]) == bool(made["ADDRESS"])
    urls = made["project_urls"]("https://forge.example/owner/project")
    assert {url.startswith("https://forge.example/owner/project") for url in urls.values()} == {True}
    assert asked["license"] == "BSD-3-Clause"
    assert not [line for line in asked["classifiers"] if line.startswith("License")]
