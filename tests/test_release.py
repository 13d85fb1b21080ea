"""What `scripts/release` refuses and cuts, and what the workflow that publishes may do."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
FILES = ("setup.py", "CHANGELOG.md", "conda/recipe.yaml", "ampcompare/base/version.py", "scripts/release")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the script reads, committed."""
    for name in (*FILES, "scripts/environment.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    _git(tmp_path, "init", "-q")
    _commit(tmp_path)
    return tmp_path


def _git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=folder, check=True)


def _commit(folder: Path) -> None:
    _git(folder, "add", "-A")
    _git(folder, "commit", "-q", "-m", "all", "--allow-empty")


def _release(folder: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [folder / "scripts/release", *words], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


def test_it_refuses_without_an_address_or_a_section_and_with_changes(checkout: Path) -> None:
    """Nothing is installed or built before; no address is in this repository."""
    status, said = _release(checkout)
    assert (status, len(said.splitlines())) == (4, 1)
    assert "ADDRESS in setup.py is empty" in said
    setup = checkout / "setup.py"
    setup.write_text(
        setup.read_text().replace('ADDRESS = ""', 'ADDRESS = "https://forge.example/owner/project"')
    )
    assert "changes that are not committed" in _release(checkout)[1]
    version = checkout / "ampcompare/base/version.py"
    version.write_text(version.read_text().replace('__version__ = "', '__version__ = "9'))
    _commit(checkout)
    status, said = _release(checkout)
    assert status == 4
    assert "CHANGELOG.md has no section 9" in said
    assert not (checkout / "build").exists()


def test_a_cut_gives_all_places_one_version(checkout: Path) -> None:
    assert _release(checkout, "cut", "1.2")[0] == 4
    status, said = _release(checkout, "cut", "7.8.9")
    assert (status, "v7.8.9" in said) == (0, True)
    log = (checkout / "CHANGELOG.md").read_text()
    assert (
        log.index("## [Unreleased]")
        < log.index("## [7.8.9] - 20")
        < log.index("### Read this before you upgrade")
    )
    assert '__version__ = "7.8.9"' in (checkout / "ampcompare/base/version.py").read_text()
    assert "  version: 7.8.9\n" in (checkout / "conda/recipe.yaml").read_text()
    assert _release(checkout, "cut", "7.8.9")[0] == 4


def test_publishing_needs_no_secret() -> None:
    """At a tag, what the script has built and checked is published by trusted publishing, with attestations."""
    text = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
    workflow = yaml.safe_load(text)
    assert "secrets." not in text
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    assert {"run": "scripts/release"} in build["steps"]
    assert "permissions" not in build
    assert (publish["needs"], publish["permissions"]) == ("build", {"id-token": "write"})
    assert publish["steps"][-1]["with"] == {"attestations": True}
    for name, given in (
        ("image", {"contents": "read", "packages": "write"}),
        ("site", {"contents": "write"}),
    ):
        assert (workflow["jobs"][name]["needs"], workflow["jobs"][name]["permissions"]) == ("build", given)
    lines = "".join(
        step.get("run", "") for name in ("image", "site") for step in workflow["jobs"][name]["steps"]
    )
    assert "scripts/docker-build cpu" in lines
    assert "scripts/docs publish" in lines
    assert "ghcr.io/${GITHUB_REPOSITORY,,}" in lines  # the forge's own address, and none that is written here
    assert list(workflow[True]) == ["push"]  # YAML reads `on` so
    assert list(workflow[True]["push"]) == ["tags"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["publish", "1.2"], "ADDRESS in setup.py is empty"),
        (["publish", "dev"], "ADDRESS in setup.py is empty"),
        (["publish", "v1.2.3"], "name the version as 1.2"),
        (["publish"], "name the version as 1.2"),
    ],
)
def test_no_site_is_published_without_an_address(checkout: Path, words: list[str], reason: str) -> None:
    shutil.copy(ROOT / "scripts/docs", checkout / "scripts/docs")
    done = subprocess.run(
        [checkout / "scripts/docs", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, reason in done.stderr) == (4, True)
