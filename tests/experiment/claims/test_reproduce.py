"""How a study is run: each shape once, GPU rows only with one, going on where it stopped, to the end of a budget."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.environment.fingerprint import fingerprint
from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.experiment.claims import reproduce as module
from ampcompare.experiment.claims.definition import Study
from ampcompare.experiment.claims.reproduce import claim_table, claims_document, reproduce, select_claims
from ampcompare.experiment.launch.base import Launcher
from ampcompare.experiment.launch.cell_files import write_record
from ampcompare.runs.records.run import RunRecord, RunSummary, dump_json
from ampcompare.runs.report.base import FORMATS
from ampcompare.runs.settings.config import RunConfig

STUDY = Study.model_validate(
    {
        "source": "a post",
        "shapes": {
            "large": {"seeds": "0-4", "arms": ["fp32", "half"], "settings": {"recipe": {"epochs": 1}}},
            "gpu": {"seeds": "0-4", "arms": ["fp32"], "settings": {"device": "cuda"}},
            "program": {"seeds": "0-4", "program": "some.program"},
        },
        "claims": [
            {"name": "a", "says": "half | diverges", "published": "NaN", "shape": "large", "limits": "it is small",
             "tests": [{"kind": "diverges", "row": "half"}]},
            {"name": "b", "says": "fp32 trains", "published": "76 %", "shape": "large",
             "tests": [{"kind": "trains", "row": "fp32", "reaches": 50}]},
            {"name": "c", "says": "fast", "published": "0.6x", "shape": "gpu", "needs_gpu": True,
             "tests": [{"kind": "time", "row": "fp32", "against": "fp32", "at_most": 1}]},
            {"name": "d", "says": "twice", "published": "NaN", "shape": "program",
             "tests": [{"kind": "diverges", "row": "step twice"}]},
        ],
    }
)  # fmt: skip


class Pretend(Launcher):
    """Half diverges, everything else ends with 90 %."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def launch(self, config: RunConfig, folder: Path, on_progress: Any = None) -> RunRecord:
        self.asked.append(config.arm)
        bad = config.arm == "half"
        record = RunRecord(
            cell=config.digest(), arm=config.arm, status="diverged" if bad else "completed", config=config,
            environment=fingerprint(),
            summary=RunSummary(metric_final=None if bad else 0.9, diverged_step=3 if bad else None, num_steps=9),
        )  # fmt: skip
        write_record(record, folder)
        return record


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for the process of a program; its calls."""
    calls: list[list[str]] = []

    def run(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(words)
        record = RunRecord(cell="0" * 12, arm="step twice", status="diverged", config=RunConfig())
        return subprocess.CompletedProcess(words, 0, "".join([dump_json(record, indent=None) + "\n"] * 5), "")

    monkeypatch.setattr(module.subprocess, "run", run)
    return calls


def test_claims_are_judged_by_the_runs_of_their_shapes(tmp_path: Path, program: list[list[str]]) -> None:
    """A shape of several claims runs once, one that needs a GPU not at all without it; a second call runs nothing."""
    launcher = Pretend()
    done = reproduce(STUDY, STUDY.claims, tmp_path, launcher, gpu=False, budget_seconds=1e6)
    assert [finding.verdict for finding in done.findings] == ["holds", "holds", "not run (needs a GPU)", "holds"]
    assert sorted(launcher.asked) == ["fp32"] * 5 + ["half"] * 5
    assert program[0][-6:] == ["some.program", "0", "1", "2", "3", "4"]
    again = reproduce(STUDY, STUDY.claims, tmp_path, Pretend(), gpu=False, budget_seconds=1e6)
    assert [finding.measured for finding in again.findings] == [finding.measured for finding in done.findings]
    assert (len(launcher.asked), len(program)) == (10, 1)


def test_a_budget_leaves_claims_open(tmp_path: Path, program: list[list[str]]) -> None:
    """A budget that is used up begins nothing, and each verdict says so; the next call goes on."""
    done = reproduce(STUDY, STUDY.claims, tmp_path, Pretend(), gpu=False, budget_seconds=-1)
    assert [finding.word for finding in done.findings] == ["inconclusive", "inconclusive", "not run", "inconclusive"]
    assert done.findings[0].reason == "no run ended; the budget ended it after 0 of 5 seeds"
    assert not program
    more = reproduce(STUDY, STUDY.claims[:1], tmp_path, Pretend(), gpu=False, budget_seconds=1e6)
    assert more.findings[0].word == "holds"


def test_claims_are_chosen_by_name() -> None:
    """All claims without a name, some by theirs, and a mistyped one is answered with the nearest."""
    assert [claim.name for claim in select_claims(STUDY, [])] == ["a", "b", "c", "d"]
    assert [claim.name for claim in select_claims(STUDY, ["c", "a", "c"])] == ["c", "a"]
    with pytest.raises(ConfigError, match="known are a, b, c, d"):
        select_claims(STUDY, ["zzz"])


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (
            subprocess.CompletedProcess([], 3, "", "Traceback\nValueError: no data\n"),
            "ended with 3: ValueError: no data",
        ),
        (subprocess.TimeoutExpired([], 600), "did not end within 600 s"),
    ],
)
def test_a_program_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Any, message: str
) -> None:
    """What a program says last is the message of the command, and nothing of it is kept."""

    def run(*_: Any, **__: Any) -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(module.subprocess, "run", run)
    with pytest.raises(LaunchError, match=message):
        reproduce(STUDY, STUDY.claims[3:], tmp_path, Pretend(), gpu=False, budget_seconds=1e6)
    assert not (tmp_path / "program" / "records.json").exists()


def test_what_is_told(tmp_path: Path, program: list[list[str]]) -> None:
    """Text, Markdown and data have a line per claim with published, measured and verdict, and the limits of each."""
    done = reproduce(STUDY, STUDY.claims, tmp_path, Pretend(), gpu=False, budget_seconds=1e6, command="ampcompare x")
    document = claims_document(done)
    text = FORMATS["table"].reporter().write(document)
    assert "4 claims: holds 3, not run 1." in text
    assert "a: it is small." in text
    markdown = FORMATS["md"].reporter().write(document)
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(rows) == 6
    assert "half \\| diverges" in rows[2]
    assert "half: diverged 5/5" in rows[2]
    assert "```\nampcompare x\n```" in markdown
    data = json.loads(FORMATS["json"].reporter().write(document))
    assert [claim["verdict"] for claim in data["claims"]] == ["holds", "holds", "not run", "holds"]
    assert [line.split()[0] for line in claim_table(STUDY.claims).splitlines()[2:]] == ["a", "b", "c", "d"]
