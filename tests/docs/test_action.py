"""The GitHub Action: the shell of its steps, run as a runner does, with stand-ins for ampcompare and gh."""

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ampcompare.cli.compare_command import command as compare

ROOT = Path(__file__).resolve().parent.parent.parent
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["id"]: step for step in ACTION["runs"]["steps"] if "run" in step}
EXPRESSION = re.compile(r"\$\{\{ *([\w.-]+) *\}\}")
AMPCOMPARE = """#!/usr/bin/env bash
printf '%s\\n' "$@" >>"$CALLS"; echo --- >>"$CALLS"
if [ "$1" = compare ]; then
    touch runs/ci/report.json
    echo "note: fp16: metric:worse is not checked: metric not comparable (of another script)" >&2
    echo "failed: bf16: accuracy is worse" >&2
    exit "${RESULT:-0}"
fi
printf '# Comparison\\n\\n| arm | verdict |\\n\\n## Measurements\\n\\nmore\\n'
"""
GH = """#!/usr/bin/env bash
printf '%s\\n' "$@" >>"$CALLS"; echo --- >>"$CALLS"
case "$*" in *--paginate*) printf '%s' "${EARLIER:-}" ;; esac
"""

Step = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def step(tmp_path: Path) -> Step:
    """Run the shell of a step by its id, with inputs and outputs of earlier steps in place of its expressions."""
    for name, text in (("ampcompare", AMPCOMPARE), ("gh", GH)):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)

    def run(
        identifier: str, values: dict[str, str] | None = None, **more: str
    ) -> subprocess.CompletedProcess[str]:
        inputs = {f"inputs.{name}": str(one.get("default", "")) for name, one in ACTION["inputs"].items()}
        known = {
            **inputs,
            "github.repository": "me/mine",
            "github.event.pull_request.number": "7",
            **(values or {}),
        }
        environment = {
            name: EXPRESSION.sub(lambda match: known[match[1]], text)
            for name, text in STEPS[identifier]["env"].items()
        }
        files = {name: str(tmp_path / name) for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY", "CALLS")}
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", STEPS[identifier]["run"]],
            cwd=tmp_path,
            env={**os.environ, **environment, **files, "PATH": path, **more},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def calls(folder: Path) -> list[list[str]]:
    """Return the words of each call of a program."""
    return [call.split("\n")[:-1] for call in (folder / "CALLS").read_text().split("---\n")[:-1]]


def test_no_step_writes_an_expression_into_its_shell() -> None:
    """Inputs are environment variables, so that a name or title from a pull request cannot become a command."""
    assert not [name for name, one in STEPS.items() if "${{" in one["run"]]


def test_the_comparison_gets_arguments_limits_and_baseline(step: Step, tmp_path: Path) -> None:
    """Arguments are split as a shell does, each line of fail-on is a limit, and `compare` knows all of the options."""
    (tmp_path / "last.json").write_text("{}")
    values = {
        "inputs.arguments": "--arm fp32,bf16 --tag 'two words; $(touch hacked)' --seeds 0-2 -- train.py --lr 0.1",
        "inputs.baseline": "last.json",
        "inputs.fail-on": "accuracy:worse\n\nmemory>5%\n",
    }
    done = step("compare", values, RESULT="1")
    assert done.returncode == 0, done.stderr  # the last step fails, after the summary
    (words,) = calls(tmp_path)
    assert words[0] == "compare"
    parsed = compare.make_context("compare", words[1:]).params
    assert (parsed["fail_on"], parsed["baseline"]) == (("accuracy:worse", "memory>5%"), "last.json")
    assert "two words; $(touch hacked)" in words
    assert words[-4:] == ["--", "train.py", "--lr", "0.1"]
    assert not (tmp_path / "hacked").exists()
    assert (tmp_path / "GITHUB_OUTPUT").read_text().splitlines() == [
        "exit-code=1",
        f"report={tmp_path}/runs/ci/report.json",
    ]


def test_a_missing_baseline_is_an_error(step: Step, tmp_path: Path) -> None:
    """A file that was moved must not turn every limit into one that nothing is compared with."""
    done = step("compare", {"inputs.arguments": "--arm fp32", "inputs.baseline": "gone.json"})
    assert done.returncode == 2
    assert done.stdout.startswith("::error::there is no baseline gone.json")
    assert not (tmp_path / "CALLS").exists()


def test_summary_and_comment_hold_the_table(step: Step, tmp_path: Path) -> None:
    """The summary has the conclusions and the exit code; the comment is written once and then changed."""
    step("compare", {"inputs.arguments": "--arm fp32"})
    assert step("summary", {"steps.compare.outputs.exit-code": "1"}).returncode == 0
    summary = (tmp_path / "GITHUB_STEP_SUMMARY").read_text()
    assert "| arm | verdict |" in summary
    assert "more" not in summary
    assert "\n* fp16: metric:worse is not checked: metric not comparable (of another script)\n" in summary
    assert summary.endswith("**Failed** with exit code 1.\n\n* bf16: accuracy is worse\n")
    assert step("comment").returncode == 0
    assert (tmp_path / "runs/ci/comment.md").read_text() == "<!-- ampcompare -->\n" + summary
    assert calls(tmp_path)[-1][:4] == ["api", "--method", "POST", "repos/me/mine/issues/7/comments"]
    step("comment", EARLIER="42")
    assert calls(tmp_path)[-1][:4] == ["api", "--method", "PATCH", "repos/me/mine/issues/comments/42"]


def test_the_exit_code_of_the_comparison_is_that_of_the_job(step: Step) -> None:
    # of any task
    assert ACTION["inputs"]["fail-on"]["default"].split() == ["metric:worse", "diverged>0", "failed>0"]
    assert [
        step("result", {"steps.compare.outputs.exit-code": code}).returncode for code in ("0", "1", "3")
    ] == [
        0,
        1,
        3,
    ]
