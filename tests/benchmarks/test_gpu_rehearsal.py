"""The rehearsal of `scripts/gpu-check` on a CPU: what runs on a GPU some day runs here to its end today."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.gpu import golden, scripts, smoke, syncs, tasks
from benchmarks.gpu.__main__ import PARTS, main
from benchmarks.gpu.report import Report

Rehearse = Callable[..., Any]


def test_syncs(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every counted loop waits for the device as often as it needs, and the JSON has its launches and bytes."""
    loops = ("bare fp32", "arm apex:O2", "arm apex:O2, fused")
    monkeypatch.setattr(syncs, "REHEARSED", (*loops, "apex O2"))
    done = rehearse("syncs")
    assert done.code == 0, done.out
    part = done.parts["syncs"]
    assert part["held"]
    counts = part["figures"]["per_step"]
    assert counts["arm apex:O2"]["syncs"] == 1
    assert counts["arm apex:O2, fused"]["syncs"] == 0
    assert all(entry["operations"] > 5 and entry["kernels"] > 5 for entry in counts.values())
    assert all(entry["operand_bytes"] > 1000 and entry["device_seconds"] > 0 for entry in counts.values())
    assert part["left_out"]  # the real Apex, without its sources
    assert done.out.startswith("gpu-check syncs: held ")


def test_golden(rehearse: Rehearse) -> None:
    """Scenarios and casts are replayed, and nobody is told that the real Apex took part."""
    done = rehearse("golden")
    assert done.code == 0, done.out
    assert len(done.parts["golden"]["checks"]) == 1 + len(golden.REHEARSED) + 98
    assert done.parts["golden"]["left_out"] == ["not compared with genuine Apex (no --apex-src)"]
    assert "not compared with genuine Apex" in done.out


@pytest.mark.extended
@pytest.mark.slow
def test_smoke(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms, parallel kinds and commands run to their end; what each arm trains is tested elsewhere."""
    monkeypatch.setattr(smoke, "ARMS", ("fp32", "fp32:tf32", "apex:O2", "native:fp16"))
    monkeypatch.setattr(smoke, "RUNS", {"ddp": smoke.RUNS["ddp"]})
    done = rehearse("smoke")
    assert done.code == 0, done.out
    assert [row["arm"] for row in done.parts["smoke"]["figures"]["arms"]] == [
        "fp32",
        "apex:O2",
        "native:fp16",
    ]


@pytest.mark.extended
@pytest.mark.slow
def test_tasks(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task trains with each arm, and further runs and a diagnosis end well."""
    monkeypatch.setattr(tasks, "TASKS", ("regression",))
    monkeypatch.setattr(tasks, "RUNS", {"gan": ("--task", "gan", "--arm", "fp32")})
    monkeypatch.setattr(tasks, "DIAGNOSED", (("--task", "regression", "--arm", "native:fp16"),))
    done = rehearse("tasks")
    assert done.code == 0, done.out
    names = [check["name"] for check in done.parts["tasks"]["checks"]]
    assert names[:3] == ["regression with fp32", "regression with apex:O1", "gan"]
    assert names[3:] == ["diagnose --task regression --arm native:fp16"]


def test_a_run_without_its_library_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason, as an arm is; the others stay."""
    name = "ampcompare.backends.library.Library.why_missing"
    monkeypatch.setattr(name, lambda self: f"needs {self.distributions[0]}")
    report = Report("tasks")
    context: Any = SimpleNamespace(rehearse=True)
    assert list(smoke.installed_runs(context, report, tasks.RUNS)) == [*tasks.RUNS][:2]
    assert report.left_out == ["lm, fp8 products (needs torchao)"]


@pytest.mark.extended
@pytest.mark.slow
def test_scripts(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example script and both migrated versions go through their arms from equal weights."""
    monkeypatch.setattr(scripts, "REHEARSED", ("script", "fp32", "apex:O1"))
    done = rehearse("scripts")
    assert done.code == 0, done.out
    assert {name: len(rows) for name, rows in done.parts["scripts"]["figures"].items()} == {
        "apex": 2,
        "rewritten": 3,
        "adapter": 3,
    }


@pytest.mark.extended
@pytest.mark.slow
def test_profile(rehearse: Rehearse) -> None:
    """Each arm has a profile whose step and memory add up, and a trace is written."""
    done = rehearse("profile")
    assert done.code == 0, done.out
    names = [check["name"] for check in done.parts["profile"]["checks"]]
    assert names[1:3] == ["mlp under fp32: parts add up", "mlp under fp32: memory adds up"]
    assert names[-1] == "mlp has a trace"


@pytest.mark.extended
@pytest.mark.slow
def test_comparisons(rehearse: Rehearse, tmp_path: Path) -> None:
    """Each comparison ends with its arms, and its pages lie next to the results."""
    done = rehearse("comparisons")
    assert done.code == 0, done.out
    assert sorted(path.name for path in tmp_path.glob("*.[hm]*")) == [
        *("claims.html", "claims.md", "eight-arms.html", "eight-arms.md"),
    ]


def test_a_failed_check_ends_with_1(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that does not hold is in the last line with what was seen, in the JSON, and in the exit code."""
    loops = ("arm half:dynamic", "bare nothing:fp16")
    monkeypatch.setattr(syncs, "SYNCS", dict.fromkeys(loops, 0))
    monkeypatch.setattr(syncs, "FIGURES", ())
    monkeypatch.setattr(syncs, "REHEARSED", loops)
    done = rehearse("syncs")
    assert done.code == 1
    assert "gpu-check syncs: FAILED, held 0 of 2 checks" in done.out
    assert "arm half:dynamic: at most 0 syncs a step: 1" in done.out
    assert "KeyError" in done.out, "a loop that raises is a failed check, not one that was left out"
    assert not done.parts["syncs"]["held"]
    assert done.parts["syncs"]["says"] == ""


def test_a_part_that_breaks_ends_with_1(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a part is a failed check, and its JSON is written."""

    def broken(context: Any, report: Any) -> None:
        report.check("first", True)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(golden, "run", broken)
    done = rehearse("golden")
    assert done.code == 1
    assert "the device is lost" in done.out
    assert [check["held"] for check in done.parts["golden"]["checks"]] == [True, False]


def test_nothing_checked_is_no_success(rehearse: Rehearse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts share the minutes of a call; neither one that checks nothing holds, nor one that no time is left for."""
    seconds = []
    monkeypatch.setattr(golden, "run", lambda context, report: seconds.append(context.seconds_left()))
    done = rehearse("golden", "--part", "golden", "--minutes", "2")
    assert all(110 < left <= 120 for left in seconds), seconds
    assert done.code == 1
    assert done.out.count("nothing was checked") == len(seconds) == 2
    monkeypatch.setattr("benchmarks.gpu.__main__.LEAST_SECONDS", 120.0)
    assert (
        "nothing was checked | left out: everything (no time left)"
        in rehearse("golden", "--minutes", "2").out
    )


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --rehearse a machine without a GPU is told so in one line, with exit code 4."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(main, ["--part", PARTS[0]])
    assert done.exit_code == 4
    assert "finds no CUDA device here" in done.output
    assert done.output.count("\n") == 1


def test_a_folder_without_apex_is_refused() -> None:
    """A wrong --apex-src is an error, not a comparison that is left out."""
    done = CliRunner().invoke(main, ["--rehearse", "--apex-src", "."])
    assert done.exit_code == 2
    assert "there is no apex/amp in it" in done.output
