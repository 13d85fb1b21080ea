"""Which codes are reported, and pre-commit itself, which runs the hooks where it is installed."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ampcompare.base.errors import ConfigError
from ampcompare.source.lint.catalog import CODES
from ampcompare.source.lint.run import LintSelection, read_lint_selection


@pytest.mark.parametrize(
    ("select", "ignore", "reported", "silent"),
    [
        ((), (), list(CODES), []),
        (("AMP4",), (), ["AMP401", "AMP404"], ["AMP201"]),
        (("AMP2",), ("AMP201",), ["AMP202"], ["AMP201", "AMP302"]),
        (("AMP201",), ("AMP2",), ["AMP201"], ["AMP202"]),
        ((), ("AMP3",), ["AMP201"], ["AMP302"]),
    ],
)
def test_prefixes(
    select: tuple[str, ...], ignore: tuple[str, ...], reported: list[str], silent: list[str]
) -> None:
    """The longer prefix decides."""
    selection = LintSelection(select, ignore)

    assert all(map(selection.reports_code, reported))
    assert not any(map(selection.reports_code, silent))


def write(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")


def test_pyproject(tmp_path: Path) -> None:
    """The nearest file above the first path that has the table counts."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    write(tmp_path, '[tool.ampcompare.lint]\nselect = ["amp2"]\nignore = ["AMP201"]\nexclude = ["old"]\n')
    write(inner, "[tool.other]\n")

    assert read_lint_selection([inner]) == LintSelection(("AMP2",), ("AMP201",), ("old",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[tool.ampcompare]\nlint = "x"\n', "is not a table"),
        (
            '[tool.ampcompare.lint]\nselekt = ["AMP2"]\n',
            "has no key 'selekt'; it has select, ignore, exclude",
        ),
        ('[tool.ampcompare.lint]\nselect = "AMP2"\n', "must be a list of strings"),
        ('[tool.ampcompare.lint]\nselect = ["E501"]\n', "no lint code begins with 'E501'"),
        ("[tool.ampcompare.lint\n", "pyproject.toml: "),
    ],
)
def test_pyproject_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    """Each fault is one line with the name of the file."""
    write(tmp_path, text)

    with pytest.raises(ConfigError, match=message):
        read_lint_selection([tmp_path])


ROOT = Path(__file__).resolve().parents[3]
WRONG = 'from apex import amp  # noqa: AMP301\n\nm, o = amp.initialize(m, o, opt_level="01")\n'


def run(words: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module of this interpreter, whose commands come first on the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )


@pytest.mark.skipif(importlib.util.find_spec("pre_commit") is None, reason="pre_commit is not installed")
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.slow
def test_pre_commit_runs_the_hooks(tmp_path: Path) -> None:
    """The hooks report and fix; here without an environment of their own, which would be installed from a registry."""
    hooks: list[dict[str, Any]] = yaml.safe_load(
        (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    )
    local = [{**hook, "language": "system"} for hook in hooks]
    config = {"repos": [{"repo": "local", "hooks": local}]}
    (tmp_path / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    script = tmp_path / "train.py"
    script.write_text(WRONG, encoding="utf-8")
    for words in (["init", "-q", "."], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    home = str(tmp_path / "home")
    report = run(["pre_commit", "run", "ampcompare-lint", "--all-files"], tmp_path, PRE_COMMIT_HOME=home)
    assert report.returncode == 1, report.stderr
    assert "train.py:3:39: AMP108" in report.stdout
    assert (
        run(["pre_commit", "run", "ampcompare-lint-fix", "-a"], tmp_path, PRE_COMMIT_HOME=home).returncode
        == 1
    )
    assert '"O1"' in script.read_text(encoding="utf-8")
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    again = run(["pre_commit", "run", "--all-files"], tmp_path, PRE_COMMIT_HOME=home)
    assert again.returncode == 0, again.stdout
