"""`ampcompare judge NEW --against OLD`: the exit code and one line of JSON are the answer."""

import json
from pathlib import Path
from typing import Any

import pytest

import ampcompare
from ampcompare.base.errors import ConfigError, RecordError
from ampcompare.cli import main
from ampcompare.results.records.document import dump_json
from ampcompare.results.records.run import RunRecord
from ampcompare.testing.made_runs import make_record

OLD = [75.0, 75.2, 74.9, 75.1, 75.05]
SPREAD = [0.01, -0.02, 0.0, 0.02, -0.01]


def table(path: Path, values: list[Any], metric: str = "accuracy", arm: str = "O2") -> str:
    path.write_text(
        f"arm,seed,{metric}\n" + "".join(f"{arm},{seed},{value}\n" for seed, value in enumerate(values))
    )
    return str(path)


def moved(by: float) -> list[float]:
    return [round(value + by + noise, 3) for value, noise in zip(OLD, SPREAD, strict=True)]


def folder(path: Path, records: list[RunRecord]) -> str:
    for record in records:
        cell = path / "cells" / record.cell
        cell.mkdir(parents=True)
        (cell / "record.json").write_text(dump_json(record))
    return str(path)


def judged(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the one line of JSON."""
    status = main(["judge", *words])
    (line,) = capsys.readouterr().out.splitlines()
    document: dict[str, Any] = json.loads(line)
    return status, document


@pytest.mark.parametrize(
    ("new", "status", "answer"),
    [
        (moved(0.0), 0, "no worse"),
        (moved(2.0), 0, "no worse"),
        (OLD, 0, "no worse"),
        (moved(-2.0), 1, "worse"),
        ([75, 71, 78, 74, 77], 2, "cannot tell"),
        ([75.1], 2, "cannot tell"),
        (["nan"] * 5, 1, "worse"),
        (["nan", *moved(0.0)[1:]], 1, "worse"),
    ],
)
def test_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], new: list[Any], status: int, answer: str
) -> None:
    """Also where the arms of both sides have different names."""
    old = table(tmp_path / "old.csv", OLD, arm="fp32")
    found, document = judged(capsys, table(tmp_path / "new.csv", new), "--against", old, "--margin", "0.5")
    assert (found, document["answer"]) == (status, answer)
    assert (document["metric"], document["margin"]) == ("top-1", 0.5)
    assert (document["new_arm"], document["old_arm"], document["old_runs"]) == ("O2", "fp32", 5)
    assert (document["seeds_needed"] == 0) == (status < 2)


def test_effect_and_interval_are_new_minus_old(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the unit that is shown, whatever the direction of the metric."""
    for metric, status in (("accuracy", 1), ("loss", 0)):
        old = table(tmp_path / "old.csv", OLD, metric)
        words = [table(tmp_path / "new.csv", moved(-2.0), metric), "--against", old, "--margin", "0.5"]
        found, document = judged(capsys, *words)
        assert found == status
        assert document["effect"] == pytest.approx(-2.0, abs=0.01)
        assert document["low"] < -2.0 < document["high"] < -1.9


def test_seeds_that_are_needed_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = [value + by for value, by in zip(OLD, (0.5, -0.6, 0.4, -0.5, 0.1), strict=True)]
    words = [
        table(tmp_path / "new.csv", new),
        "--against",
        table(tmp_path / "old.csv", OLD),
        "--margin",
        "0.5",
    ]
    status, document = judged(capsys, *words)
    assert status == 2
    assert document["verdict"] == f"inconclusive (≤{document['seeds_needed']} more seeds)"


def test_two_divergences_alike_are_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """New results are not worse for what the old ones do as often."""
    values = ["nan", *OLD[1:]]
    words = [
        table(tmp_path / "new.csv", values),
        "--against",
        table(tmp_path / "old.csv", values),
        "--margin",
        "0.5",
    ]
    assert judged(capsys, *words)[0] == 2


def test_run_directories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of other settings are compared: what was changed is what the caller asks about. A table may be one side."""
    shares = [0.75, 0.752, 0.749, 0.751, 0.75]
    old = folder(tmp_path / "old", [make_record("fp32", seed, top1=top1) for seed, top1 in enumerate(shares)])
    same = folder(
        tmp_path / "same", [make_record("apex:O2", seed, top1=top1) for seed, top1 in enumerate(shares)]
    )
    worse = folder(
        tmp_path / "worse",
        [make_record("apex:O2", seed, top1=top1 - 0.1) for seed, top1 in enumerate(shares)],
    )
    assert judged(capsys, same, "--against", old, "--margin", "3")[0] == 0
    status, document = judged(capsys, worse, "--against", old, "--margin", "3")
    assert (status, document["new_arm"], document["old_arm"]) == (1, "apex:O2", "fp32")
    assert document["effect"] == pytest.approx(-10.0, abs=0.1)
    as_table = table(tmp_path / "old.csv", [100 * share for share in shares])
    assert judged(capsys, worse, "--against", as_table, "--margin", "3")[0] == 1


def test_several_arms_need_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [make_record(arm, seed, top1=0.75) for arm in ("fp32", "apex:O2") for seed in range(5)]
    both = folder(tmp_path / "both", records)
    assert main(["judge", both, "--against", both, "--margin", "3"]) == 64
    assert "several arms; name one with --arm: " in capsys.readouterr().err
    status, document = judged(capsys, both, "--against", both, "--margin", "3", "--arm", "O2")
    assert (status, document["new_arm"]) == (0, "apex:O2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.csv", "--against", "old.csv"], "cannot read missing.csv"),
        (["new.csv", "--against", "missing"], "cannot read missing"),
        (["new.csv", "--against", "empty"], "holds no records"),
        (["new.csv", "--against=old.csv", "--margn", "1"], "--margn"),
        (["new.csv", "--against"], "--against"),
        (
            ["--against", "old.csv"],
            "--against OLD needs new results; name them: ampcompare judge NEW --against OLD",
        ),
        (["new.csv", "--against", "old.csv", "--example"], "--example is not for --against"),
        (["new.csv", "--against", "old.csv", "--reference", "O2"], "--reference is not for --against"),
        (["new.csv", "--against", "old.csv", "--margin", "0"], "margin is 0"),
        (["new.csv", "--against", "loss.csv"], "name one metric of both"),
        (["new.csv", "--against", "old.csv", "--sd", "-1"], "spread over seeds is -1"),
    ],
)
def test_what_cannot_be_used_is_no_answer(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ends with 64, which is none of the answers, and prints nothing on stdout."""
    monkeypatch.chdir(tmp_path)
    table(Path("new.csv"), moved(0.0))
    table(Path("old.csv"), OLD)
    table(Path("loss.csv"), OLD, "loss")
    Path("empty").mkdir()
    assert main(["judge", *words]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_usage_errors_of_judge_alone_stay(tmp_path: Path) -> None:
    old = table(tmp_path / "old.csv", OLD)
    assert main(["judge", old, "--margn", "1"]) == 2
    assert main(["judge", old, "--arm", "O2"]) == 2
    assert main(["judge", str(tmp_path / "missing.csv")]) == 2


def test_from_python(tmp_path: Path) -> None:
    """The same answer, with the exit code of the command; errors are those of the package."""
    old = table(tmp_path / "old.csv", OLD)
    result = ampcompare.judge_against(table(tmp_path / "new.csv", moved(-2.0)), old, margin=0.5)
    assert (result.answer, result.exit_code) == ("worse", 1)
    assert json.loads(json.dumps(result.data()))["answer"] == "worse"
    with pytest.raises(RecordError):
        ampcompare.judge_against(tmp_path / "missing.csv", old)
    runs = folder(tmp_path / "runs", [make_record("O2", 0)])
    with pytest.raises(ConfigError, match="was trained by top-1, not loss"):
        ampcompare.judge_against(runs, old, metric="loss")
