"""The commands that export and size runs."""

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.results.records.comparison import Comparison
from ampcompare.results.report.export import Exporter

from .conftest import TINY


class Keep(Exporter):
    """Keeps what it is asked to write."""

    def __init__(self, *given: Any) -> None:
        self.given = given
        self.written: list[tuple[Comparison, Path]] = []

    def export_records(self, comparison: Comparison, folder: Path) -> None:
        self.written.append((comparison, folder))


def test_a_run_is_exported(call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a real cell goes to the tracker."""
    done = call("run", "--arch", "mlp", *TINY, "-o", str(tmp_path))
    assert done.code == 0, done.err
    made: list[Keep] = []
    monkeypatch.setattr(
        "ampcompare.api.comparison.make_exporter", lambda *given: made.append(Keep(*given)) or made[-1]
    )
    assert call("export", str(tmp_path), "--to", "wandb", "--project", "mine").code == 0
    ((comparison, folder),) = made[0].written
    assert (made[0].given[0], made[0].given[1], made[0].given[3]) == ("wandb", tmp_path / "wandb", "mine")
    assert ([record.arm for record in comparison.records], folder) == (["fp32"], tmp_path)


def test_what_cannot_be_exported_is_one_line(call: Callable[..., Any]) -> None:
    """No such folder: exit code 2."""
    done = call("export", "nowhere", "--to", "mlflow")
    assert (done.code, "nowhere is not a run directory" in done.err) == (2, True)


def test_the_largest_batch_is_found_in_processes(call: Callable[..., Any]) -> None:
    """Of 64 samples the batch of all fits, and twice as much has too few samples."""
    done = call("find-batch", "--arch", "mlp", *TINY, "-b", "64", "--memory-limit", "8", "--json")
    assert done.code == 0, done.err
    (limit,) = done.json()
    assert (limit["arm"], limit["fits"]["batch"], limit["fails"]["batch"]) == ("fp32", 64, 68)
    assert "fewer than one batch" in limit["fails"]["reason"]
    assert call("find-batch", *TINY).code == 2


@pytest.mark.slow
def test_the_largest_batch_is_found_in_another_environment(call: Callable[..., Any], tmp_path: Path) -> None:
    """By the ampcompare that is there; a stack without torch or ampcompare, or none, is a row with its reason."""
    bare = f"env PYTHONPATH={sysconfig.get_paths()['purelib']} {sys.executable} -S"
    gone, empty = tmp_path / "python", f"{sys.executable} -I -S"
    stacks = {"new": sys.executable, "bare": bare, "empty": empty, "gone": str(gone)}
    words = [word for name, command in stacks.items() for word in ("--stack", f"{name}={command}")]
    words += [*TINY, "--arch", "mlp", "-b", "64", "--memory-limit", "8", "--no-preflight"]
    done = call("find-batch", "--arm", "bf16@new,fp32,fp32@bare,fp32@empty,fp32@gone", *words, "--json")
    assert done.code == 0, done.err
    limits = {f"{limit['arm']}@{limit['stack']}": limit for limit in done.json()}
    for trained in ("native:bf16@new", "fp32@None"):
        assert (limits[trained]["fits"]["batch"], limits[trained]["fails"]["batch"]) == (64, 68)
        assert limits[trained]["error"] is None
        assert limits[trained]["environment"]["torch"]
    reasons = {
        "bare": "the stack bare has no ampcompare",
        "empty": "the stack empty has no torch that can be imported",
        "gone": "the stack gone cannot be started",
    }
    for name, reason in reasons.items():
        assert (limits[f"fp32@{name}"]["fits"], limits[f"fp32@{name}"]["tries"]) == (None, 0)
        assert limits[f"fp32@{name}"]["error"].startswith(reason)


def test_no_stack_that_can_try_a_batch_is_exit_code_3(call: Callable[..., Any], tmp_path: Path) -> None:
    done = call(
        "find-batch", "--stack", f"gone={tmp_path}/python", "--arm", "fp32@gone", "--memory-limit", "1", *TINY
    )
    assert done.code == 3
    assert "Traceback" not in done.err
    (row,) = [line for line in done.out.splitlines() if line.startswith("fp32@gone")]
    assert "unknown" in row
    assert "the stack gone cannot be started" in row


def test_a_run_is_a_row_of_its_stack(call: Callable[..., Any], tmp_path: Path) -> None:
    """Also where it cannot be started."""
    (tmp_path / "train.py").write_text("")
    stack = f"gone={tmp_path}/python"
    done = call("run", "--stack", stack, "--arm", "script@gone", "-o", str(tmp_path / "out"), "--",
                str(tmp_path / "train.py"))  # fmt: skip
    assert done.code == 3
    assert "script@gone failed: the stack gone cannot be started" in done.err
