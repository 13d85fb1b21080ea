"""The options of `compare` that make an experiment of it: rows by setting, jobs, limits, files, estimates."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ampcompare.cli import main
from ampcompare.cli.comparison_output import show_plan
from ampcompare.results.records.preflight import ArmTrial, Preflight
from ampcompare.settings.config import RunConfig

Call = Callable[..., Any]
PAIR = ("compare", "--arm", "fp32", "--arm", "native:bf16", "--arch", "mlp")


@pytest.mark.usefixtures("forked_servers")
@pytest.mark.slow
def test_jobs_and_varied_settings(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two cells at once, each from a server of its own, over two batch sizes: four rows; times and recipes differ."""
    words = [
        *PAIR,
        "--seeds",
        "0",
        "--jobs",
        "2",
        "--sweep",
        "batch_size=16,32",
        "--tag",
        "two <b>",
        "--json",
    ]
    size = [
        "--data",
        "synthetic",
        "--train-size",
        "64",
        "--val-size",
        "32",
        "--image-size",
        "8",
        "--epochs",
        "1",
    ]
    assert main([*words, *size, "--device", "cpu", "-o", str(tmp_path / "run")]) == 0
    document = json.loads(capfd.readouterr().out)
    rows = {row["arm"]: row for row in document["arms"]}
    assert len(rows) == 4
    assert rows["native:bf16 batch_size=16"]["time"]["why"] == "2 cells ran at once"
    assert rows["fp32 batch_size=32"]["quality"]["why"] == "global batch size 32, not 16"
    assert document["tag"] == "two <b>"
    assert main(["report", str(tmp_path / "run"), "--format", "latex"]) == 0
    assert capfd.readouterr().out.count("\\begin{tabular}") == 3
    assert "# Comparison: two \\<b\\>" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.parametrize(("seeds", "is_noted"), [("5", True), ("0", False), ("0-4", False), ("5,6", False)])
def test_a_single_seed_above_0_is_noted(call: Call, tmp_path: Path, seeds: str, is_noted: bool) -> None:
    """People who type 5 mean five seeds."""
    done = call(
        *PAIR, "-o", str(tmp_path / "runs"), "--seeds", seeds, "--dry-run", "--no-preflight", tiny=True
    )
    assert (
        "--seeds 5 is one seed, the 6th; 5 seeds are --seeds 0-4" in " ".join(done.err.split())
    ) == is_noted


@pytest.mark.slow
def test_an_estimate_before_and_after(call: Call, tmp_path: Path) -> None:
    """A dry run without a preflight knows nothing at first, and goes by the records once there are some."""
    words = [*PAIR, "-o", str(tmp_path / "runs" / "own")]  # no other run directory is next to it
    before = call(*words, "--seeds", "0-3", "--dry-run", "--no-preflight", tiny=True)
    assert "unknown" in before.out
    assert "about" in call(*words, "--seeds", "0-3", "--dry-run", tiny=True).out.splitlines()[-1]
    call(*words, "--seeds", "0", tiny=True)
    after = call(*words, "--seeds", "0-3", "--dry-run", "--json", tiny=True).json()["estimate"]
    assert after["cells"] == 6
    assert after["seconds"] > 0
    last = call(*words, "--seeds", "0-3", "--dry-run", tiny=True).out.splitlines()[-1]
    assert re.match(r"time and memory: about [\d.]+s for 6 cells without a record, at most [\d.]+ MiB", last)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--fail-on", "speed>1"), "cannot be read"),
        (("--baseline", "missing.json", "--fail-on", "metric:worse"), "there is no missing.json"),
        (("--baseline", "missing.json"), "--baseline needs --fail-on, which compares with it; give both"),
        (("--budget", "soon"), "not a time"),
        (("--budget", "2m", "--seeds", "0-2"), "--budget needs --seeds auto, whose number it limits"),
        (("--log-interval", "0"), "drain_every: must be at least 1 (seen: 0 from flag --log-interval)"),
        (("--progress-interval", "often"), "--progress-interval 'often' is not a time"),
        (("--sweep", "colour=1"), "is not a setting; ampcompare config show lists them all"),
        (("--sweep", "epoch=1,2"), "choose one of recipe.epochs"),
        (("--margin", "-1"), "margin is -1"),
        (("--seeds", "automatic"), "cannot be read"),
        (("--gpus", "0,x", "--dry-run"), "--gpus '0,x' cannot be read; write numbers as 0,2-3"),
        (("--gpus", "0-1,1", "--dry-run"), "--gpus '0-1,1' names a GPU twice"),
        (("--timing-rounds", "2", "--jobs", "2"), "one arm after the other"),
    ],
)
def test_bad_options_are_one_line(call: Call, words: tuple[str, ...], said: str) -> None:
    """What cannot be used is said before anything runs, with exit code 2."""
    done = call(*PAIR, *words, tiny=True)
    assert done.code == 2
    assert said in done.err
    assert len(done.lines) == 1


def test_event_files_for_tensorboard(call: Call, tmp_path: Path) -> None:
    """Every arm and seed has an event file after the comparison, and one that is lost is there again after the next."""
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    words = [*PAIR, "--seeds", "3", "-o", str(tmp_path / "run"), "--tensorboard", str(tmp_path / "tb")]
    assert call(*words, tiny=True).code == 0
    files = {
        path.relative_to(tmp_path / "tb"): path.read_bytes() for path in (tmp_path / "tb").rglob("*tfevents*")
    }
    runs = {path.parent.as_posix() for path in files}
    assert runs == {f"{arm}/seed=3" for arm in ("fp32", "native-bf16")}
    lost = tmp_path / "tb" / next(iter(files))
    lost.unlink()
    assert call(*words, tiny=True).code == 0
    assert {path: (tmp_path / "tb" / path).read_bytes() for path in files} == files


def test_a_plan_whose_other_arms_cannot_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No record is spoken of where there is none."""
    plan = SimpleNamespace(labels=["half"], arms=("half",), cells=[RunConfig(arm="half")])
    planned: Any = SimpleNamespace(plan=plan, folder=tmp_path / "runs")
    found = Preflight(arms={"half": ArmTrial(error="no", exit_code=3)})
    show_plan(planned, found, as_json=False)
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "time and memory: none, the other cells, of half, cannot train"
    )
