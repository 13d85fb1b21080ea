"""Attacks on the records of a run directory: each is named, and none moves a verdict."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.environment.fingerprint import fingerprint
from ampcompare.base.errors import RecordError
from ampcompare.experiment.load import reload_comparison
from ampcompare.experiment.run_directory import RunDirectory
from ampcompare.runs.analysis.runs.record_checks import contradiction, implausible, read_checked, unique_runs
from ampcompare.runs.analysis.summary import summarize
from ampcompare.runs.records.comparison import ArmSummary, Comparison
from ampcompare.runs.records.document import record_checksum
from ampcompare.runs.records.run import RunRecord, dump_json, read_record

MakeFolder = Callable[..., Path]
FindRecord = Callable[[Path, str, int], Path]
MakeRecord = Callable[..., RunRecord]


def _row(comparison: Comparison, arm: str = "half") -> ArmSummary:
    return next(row for row in comparison.arms if row.arm == arm)


def _edit(path: Path, change: Callable[[dict[str, Any]], object], *, seal: bool = True) -> None:
    """Change a record as somebody does who knows of the checksum, or as somebody who does not."""
    data = json.loads(path.read_text())
    change(data)
    if seal:
        data["checksum"] = record_checksum(data)
    path.write_text(json.dumps(data))


def _summary(**values: Any) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["summary"].update(values)


@pytest.fixture(scope="module")
def honest(honest_folder: MakeFolder) -> Comparison:
    """What records as runs write them give."""
    return reload_comparison(honest_folder(range(5)))


@pytest.fixture
def stored(honest: Comparison, tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """The report.json of these records, as data and as a file."""
    text = dump_json(honest)
    path = tmp_path / "report.json"
    path.write_text(text)
    return json.loads(text), path


def test_honest_records_have_nothing_to_hide(honest: Comparison, stored: tuple[dict[str, Any], Path]) -> None:
    """All are used, with their pairs and verdicts, from a folder and from a report: no attack is seen where none is."""
    assert honest.excluded == []
    assert (_row(honest).pairs, _row(honest).accuracy_verdict) == (5, "equivalent (±0.5)")
    assert reload_comparison(stored[1]) == honest


ATTACKS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "top-1 above its counts": (
        _summary(metric_final=0.525),
        "metric_final is 0.525, and its counts (501 of 1000) give",
    ),
    "best above its counts": (_summary(metric_best=0.6), "metric_best is 0.6, and its epochs give 0.501"),
    "top-1 of 900 %": (_summary(metric_final=9.0), "metric_final is 9.0, and a share is 0 to 1"),
    "negative top-1": (_summary(metric_final=-0.1), "metric_final is -0.1, and a share is 0 to 1"),
    "top-1 of NaN": (_summary(metric_final="nan"), "metric_final is nan, and a share is 0 to 1"),
    "900 right of 100": (lambda data: data["summary"]["epochs"][0].update(samples=100), "right of 100 samples"),
    "time of zero": (_summary(step_seconds_median=0.0), "step_seconds_median is 0.0, and a time or rate is finite"),
    "negative time": (_summary(step_seconds_median=-1.0), "summary.step_seconds_median"),
    "infinite time": (_summary(step_seconds_median="inf"), "summary.step_seconds_median"),
    "faster than its steps": (
        _summary(step_seconds_median=0.005, samples_per_second=64 / 0.005),
        "the median of steps.jsonl is 0.01001",
    ),
    "faster than its throughput": (_summary(step_seconds_median=0.005), "batch size over step_seconds_median gives"),
    "other losses": (_summary(losses_sha256="0" * 64), "losses_sha256 is 000000000000, and the losses of steps.jsonl"),
    "more steps": (_summary(num_steps=600), "it counts 600 steps, but steps.jsonl has 60"),
    "a better tail": (_summary(loss_tail=0.001), "loss_tail is 0.001, and the last losses of steps.jsonl give 0.04"),
    "answers that differ beyond all": (
        _summary(in_precisions=[{"precision": "fp16", "answers": 5, "differing": 6}]),
        "6 of 5 answers differ in fp16",
    ),
    "top-1 of 900 % in fp16": (
        _summary(in_precisions=[{"precision": "fp16", "values": {"top-1": 9.0}}]),
        "top-1 in fp16 is 9.0, and a share is 0 to 1",
    ),
    "hidden skips": (_summary(skipped_steps=7), "it counts 7 skipped steps, but steps.jsonl has 0"),
    "skips beyond steps": (_summary(skipped_steps=61), "61 of 60 steps were skipped"),
    "two first epochs": (
        lambda data: data["summary"].update(epochs=2 * data["summary"]["epochs"]),
        "its epochs are [0, 0], of 1 in its settings",
    ),
    "another seed": (
        lambda data: data["config"]["recipe"].update(seed=7),
        "but its settings (half, seed 7) are those of cell",
    ),
    "another arm": (lambda data: data.update(arm="fp32"), "it calls its arm fp32, but its settings say half"),
    "diverged, called completed": (_summary(diverged_step=7), "it is marked as completed, but diverged at step 7"),
    "ended as its settings do not allow": (_summary(ended="no better top-1"), "neither early_stop nor target"),
    "went back as its settings do not allow": (
        _summary(rollbacks=[3]),
        "it rolled back at [3], but its settings say on_nan",
    ),
    "no steps": (_summary(num_steps=0), "it is marked as completed, but counts no steps"),
    "another last loss": (_summary(loss_final=0.1), "loss_final is 0.1, and its epochs give 1.0"),
    "a class of more than all": (
        lambda data: data["summary"]["epochs"][0].update(majority_correct=5000),
        "5000 of 1000 samples in the largest",
    ),
    "a class of none": (
        lambda data: data["summary"]["epochs"][0].update(majority_correct=0),
        "0 of 1000 samples in the largest class",
    ),
    "a loss that falls in the trace alone": (
        lambda data: data.update(trace={"steps": [0, 59], "losses": [9.0, 0.1], "step_seconds": []}),
        "its trace has a loss of 9.0 at step 0, but steps.jsonl has 2.004",
    ),
    "no cell at once": (lambda data: data.update(jobs=0), "0 cells ran at the same time"),
    "no checksum": (lambda data: data.update(checksum=None), "it has no checksum, which every record with a host has"),
}


@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "no checksum"])
def test_an_edited_record_is_not_read(attack: str, run_folder: MakeFolder, record_path: FindRecord) -> None:
    """A record with a changed value is refused, with the name of the file and the value."""
    change, words = ATTACKS[attack]
    path = record_path(run_folder(range(1)), "half", 0)
    _edit(path, change)
    with pytest.raises(RecordError) as caught:
        read_checked(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("attack", ["top-1 above its counts", "negative time", "other losses"])
def test_an_edited_record_is_named_and_not_used(attack: str, run_folder: MakeFolder, record_path: FindRecord) -> None:
    """A record that contradicts itself, its form or its steps is left out of the report; the rest is shown."""
    folder = run_folder()
    path = record_path(folder, "half", 0)
    _edit(path, ATTACKS[attack][0])
    comparison = reload_comparison(folder)
    (excluded,) = comparison.excluded
    assert str(path) in excluded
    assert ATTACKS[attack][1] in excluded
    assert (_row(comparison).pairs, _row(comparison, "fp32").completed) == (4, 5)
    assert comparison.reading[0] == f"Not used: {excluded}."


@pytest.mark.parametrize(
    "change",
    [lambda data: data.update(half="fp16 native"), lambda data: data.update(host="there"), _summary(peak_bytes=1)],
)
def test_what_contradicts_nothing_is_noticed_by_the_checksum(
    run_folder: MakeFolder, record_path: FindRecord, change: Callable[[dict[str, Any]], object]
) -> None:
    """An edit of a value that stands alone is noticed too, unless its author knows how the checksum is made."""
    folder = run_folder()
    path = record_path(folder, "half", 1)
    _edit(path, change, seal=False)
    with pytest.raises(RecordError, match="changed after it was written: its checksum does not match"):
        read_checked(path)


def test_a_record_without_its_checksum_is_not_used(run_folder: MakeFolder, record_path: FindRecord) -> None:
    """The checksum cannot be taken away: only old records, which have no host either, are without."""
    path = record_path(run_folder(), "half", 0)
    _edit(path, ATTACKS["no checksum"][0], seal=False)
    with pytest.raises(RecordError, match="it has no checksum"):
        read_checked(path)
    _edit(path, lambda data: (data.pop("host"), data.pop("checksum")), seal=False)
    assert read_checked(path).arm == "half"


def test_a_seed_copied_over_others_gives_no_pair(run_folder: MakeFolder, record_path: FindRecord) -> None:
    """Seed 0's record over those of other seeds is foreign there; one pair is left, and no verdict."""
    folder = run_folder()
    for arm in ("fp32", "half"):
        for seed in range(1, 5):
            shutil.copy(record_path(folder, arm, 0), folder / "cells" / _digest(folder, arm, seed) / "record.json")
    comparison = reload_comparison(folder)
    assert len(comparison.excluded) == 8
    assert all("seed 0), but is in the folder of cell" in text for text in comparison.excluded)
    assert _row(comparison).pairs == 1
    assert _row(comparison).accuracy_verdict.startswith("inconclusive")


def _digest(folder: Path, arm: str, seed: int) -> str:
    return str(json.loads((folder / "plan.json").read_text())["cells"][f"{arm}@{seed}"])


def test_copied_folders_are_no_further_runs(run_folder: MakeFolder) -> None:
    """Without a plan, copies of cells under other names are named and not counted: pairs do not multiply."""
    folder = run_folder(range(3), with_plan=False)
    for cell in list((folder / "cells").iterdir()):
        for number in range(2):
            shutil.copytree(cell, cell.with_name(f"{number:012d}{cell.name}"[-12:] + str(number)))
    comparison = reload_comparison(folder)
    assert len(comparison.excluded) == 12
    assert _row(comparison).pairs == 3


def test_a_forged_seed_is_no_further_run(run_folder: MakeFolder, record_path: FindRecord) -> None:
    """A copy with another seed, made with care, has the losses of the seed that it was: it is not counted."""
    folder = run_folder(range(3), with_plan=False)
    for arm in ("fp32", "half"):
        data = json.loads(record_path(folder, arm, 0).read_text())
        data["config"]["recipe"]["seed"] = 9
        record = RunRecord.model_validate(data)
        data["cell"] = record.config.digest()
        data["checksum"] = record_checksum(data)
        path = folder / "cells" / data["cell"] / "record.json"
        path.parent.mkdir()
        path.write_text(json.dumps(data))
    comparison = reload_comparison(folder)
    assert [text.partition(": ")[2] for text in comparison.excluded] == [
        "its losses are those of seed 0 to the last bit, so it is not an independent run"
    ] * 2
    assert _row(comparison).pairs == 3


@pytest.mark.parametrize("copies", [2, 4])
def test_copies_of_one_seed_give_no_verdict(make_record: MakeRecord, copies: int) -> None:
    """One seed never gives a winner, however often its records are given."""
    records = copies * [make_record("fp32", 0, top1=0.5), make_record("half", 0, top1=0.506)]
    comparison = summarize(records, arms=["fp32", "half"], reference="fp32")
    assert _row(comparison).pairs == 1
    assert _row(comparison).accuracy_verdict.startswith("inconclusive")
    assert len(comparison.excluded) == 2 * (copies - 1)
    assert "half, seed 0: a second record of this cell" in comparison.excluded


@pytest.mark.parametrize(
    "values",
    [{"metric_final": 9.0}, {"metric_final": float("nan")}, {"metric_final": -0.5}, {"step_seconds_median": -0.01},
     {"step_seconds_median": 0.0}, {"step_seconds_median": float("nan")}, {"peak_bytes": -1}],
)  # fmt: skip
def test_values_that_no_run_has_end_in_no_crash(make_record: MakeRecord, values: dict[str, Any]) -> None:
    """A record in memory with an impossible value is left out and named, with the value."""
    records = [make_record(arm, seed) for arm in ("fp32", "half") for seed in range(4)]
    wrong = records[-1].model_copy(update={"summary": records[-1].summary.model_copy(update=values)})
    comparison = summarize([*records[:-1], wrong], arms=["fp32", "half"], reference="fp32")
    ((name, value),) = values.items()
    assert comparison.excluded == [f"half, seed 3: {implausible(wrong)}"]
    assert f"{name} is {value}" in comparison.excluded[0]
    assert _row(comparison).pairs == 3


def test_cpu_half_against_the_settings(run_folder: MakeFolder, record_path: FindRecord) -> None:
    """A run that was told to emulate fp16 cannot have computed it natively."""
    record = read_record(record_path(run_folder(), "half", 0))
    config = record.config.model_copy(update={"cpu_half": "emulated"})
    forged = record.model_copy(update={"config": config, "half": "fp16 native"})
    assert contradiction(forged) == "it says fp16 native, but its settings say cpu_half emulated"
    assert contradiction(forged.model_copy(update={"half": "fp16 emulated"})) == ""


def test_a_plan_that_names_another_cell(run_folder: MakeFolder) -> None:
    """A plan that gives the cell of one arm to the row of another is named, and the cell is not in that row."""
    folder = run_folder()
    path = folder / "plan.json"
    plan = json.loads(path.read_text())
    plan["cells"]["half@0"] = plan["cells"]["fp32@0"]
    path.write_text(json.dumps(plan))
    comparison = reload_comparison(folder)
    cell = plan["cells"]["fp32@0"]
    assert comparison.excluded == [f"{path}: it says that half@0 is cell {cell}, which is fp32, seed 0"]
    assert _row(comparison).pairs == 4


@pytest.mark.parametrize("row", ["half threads=8", "half on_nan=skip tf32=on", "half again", "half nothing=1"])
def test_a_row_says_what_its_cells_are(run_folder: MakeFolder, row: str) -> None:
    """A label that names a setting which the cells do not have would allow what is refused without it."""
    folder = run_folder()
    path = folder / "plan.json"
    plan = json.loads(path.read_text())
    plan["arms"] = ["fp32", row]
    plan["cells"] = {label.replace("half@", f"{row}@"): cell for label, cell in plan["cells"].items()}
    path.write_text(json.dumps(plan))
    comparison = reload_comparison(folder)
    assert len(comparison.excluded) == 5
    assert f"it says that {row}@0 is cell" in comparison.excluded[0]
    assert _row(comparison, row).pairs == 0


def test_a_row_may_name_what_its_cells_have(run_folder: MakeFolder) -> None:
    """Numbers, words, lists and None are compared as a label writes them."""
    folder = run_folder()
    path = folder / "plan.json"
    plan = json.loads(path.read_text())
    row = "half threads=1 lr=0.05 deterministic=False on_nan=stop betas=(0.9, 0.999) max_skipped=None"
    plan["arms"] = ["fp32", row]
    plan["cells"] = {label.replace("half@", f"{row}@"): cell for label, cell in plan["cells"].items()}
    path.write_text(json.dumps(plan))
    assert _row(reload_comparison(folder), row).pairs == 5


def test_a_run_that_is_not_there_ends_the_test(run_folder: MakeFolder, record_path: FindRecord) -> None:
    """Where a record of the plan was deleted, the others are shown, and nothing is tested on what somebody left."""
    folder = run_folder()
    record_path(folder, "half", 3).unlink()
    comparison = reload_comparison(folder)
    assert (_row(comparison).pairs, _row(comparison).accuracy_verdict) == (4, "inconclusive (not tested)")
    assert any(line.startswith("Nothing was tested: some runs of this plan") for line in comparison.reading)


REPORT_ATTACKS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "verdict": (lambda data: data["arms"][1].update(accuracy_verdict="better"), "that half is better, not equivalent"),
    "mean": (lambda data: data["arms"][1].update(metric_difference=0.05), "that half differs by +5.00 pp, not "),
    "margin": (lambda data: data.update(margin=3.0), "a margin of 3, not 0.5"),
    "error rate": (lambda data: data.update(error_rate=0.5), "an error rate of 50, not 5"),
    "advice": (
        lambda data: data["headline"].insert(0, "Use half: better accuracy than fp32, 0.10x its step time."),
        '"Use half", which does not follow',
    ),
}


@pytest.mark.parametrize("attack", REPORT_ATTACKS)
def test_a_report_that_contradicts_its_records(
    attack: str, honest: Comparison, stored: tuple[dict[str, Any], Path]
) -> None:
    """An edited row, term or line of a report.json is named first, and what the records give is shown."""
    change, words = REPORT_ATTACKS[attack]
    data, path = stored
    change(data)
    path.write_text(json.dumps(data))
    comparison = reload_comparison(path)
    assert words in comparison.headline[0]
    assert (comparison.arms, comparison.margin, comparison.error_rate) == (honest.arms, 0.5, 0.05)
    assert (comparison.headline[1:], comparison.reading) == (honest.headline, honest.reading)


def test_a_headline_is_never_read_from_a_file(honest: Comparison, stored: tuple[dict[str, Any], Path]) -> None:
    """Sentences that somebody wrote into a report.json, or that an older one lacks, are those that its rows give."""
    data, path = stored
    for other in (["half is more accurate than fp32."], []):
        path.write_text(json.dumps({**data, "headline": other, "next_steps": []}))
        assert reload_comparison(path) == honest


def test_a_report_with_records_under_other_seeds(stored: tuple[dict[str, Any], Path]) -> None:
    """A record of a report.json that was given another seed is not that of the cell that it names."""
    data, path = stored
    for record in data["records"]:
        record["config"]["recipe"]["seed"] += 10
    path.write_text(json.dumps(data))
    comparison = reload_comparison(path)
    assert len(comparison.excluded) == 10
    assert "but its settings are those of cell" in comparison.excluded[0]


def test_a_stored_report_is_checked_too(stored: tuple[dict[str, Any], Path]) -> None:
    """An edited record inside a report.json is left out, and the rows are computed again without it."""
    data, path = stored
    for record in data["records"]:
        if record["arm"] == "half":
            record["summary"]["metric_final"] += 0.02
    path.write_text(json.dumps(data))
    comparison = reload_comparison(path)
    assert len(comparison.excluded) == 5
    assert (_row(comparison).pairs, _row(comparison).accuracy_verdict, _row(comparison).status) == (0, "", "not run")


def test_nothing_that_can_be_used(run_folder: MakeFolder, record_path: FindRecord) -> None:
    """Where no record is left there is an error that says why, not an empty table."""
    folder = run_folder(range(1))
    for arm in ("fp32", "half"):
        _edit(record_path(folder, arm, 0), _summary(metric_final=0.9))
    with pytest.raises(RecordError, match=r"holds no usable record: .*its counts"):
        reload_comparison(folder)


@pytest.mark.parametrize("attack", ["top-1 above its counts", "other losses", "another arm", "time of zero"])
def test_compare_runs_such_a_cell_again(attack: str, run_folder: MakeFolder, record_path: FindRecord) -> None:
    """An edited record is not taken for a finished cell; it stays under another name, and the reason is told."""
    folder = run_folder(range(1))
    path = record_path(folder, "half", 0)
    config = read_record(path).config
    _edit(path, lambda data: data.update(environment={**data["environment"], **fingerprint()}))
    assert RunDirectory(folder).reusable(config).record is not None
    _edit(path, ATTACKS[attack][0])
    reuse = RunDirectory(folder).reusable(config)
    assert reuse.record is None
    assert ATTACKS[attack][1] in reuse.reason
    assert reuse.reason.endswith("; the file is kept as record.rejected.json")
    assert path.with_name("record.rejected.json").exists()
    assert not path.exists()


def test_compare_takes_no_record_of_another_cell(run_folder: MakeFolder, record_path: FindRecord) -> None:
    """Seed 0's record in the folder of seed 1 is not the result of seed 1."""
    folder = run_folder(range(2))
    source, target = record_path(folder, "half", 0), record_path(folder, "half", 1)
    config = read_record(target).config
    _edit(source, lambda data: data.update(environment={**data["environment"], **fingerprint()}))
    shutil.copy(source, target)
    reuse = RunDirectory(folder).reusable(config)
    assert reuse.record is None
    assert f"(half, seed 0), but is in the folder of cell {config.digest()}" in reuse.reason


def test_steps_that_are_not_at_hand_prove_nothing(run_folder: MakeFolder, record_path: FindRecord) -> None:
    """A record whose steps were deleted, or begin later, stands for itself."""
    path = record_path(run_folder(range(1)), "half", 0)
    steps = path.with_name("steps.jsonl")
    lines = steps.read_text().splitlines(keepends=True)
    steps.write_text("".join(lines[10:]))
    assert read_checked(path).arm == "half"
    steps.unlink()
    assert read_checked(path).arm == "half"


def test_diverged_runs_of_equal_losses_all_count(make_record: MakeRecord) -> None:
    """Runs that are NaN from the first step on have equal losses over seeds, and each is a divergence."""
    records = [make_record("half", seed, status="diverged", losses="all NaN") for seed in range(3)]
    kept, excluded = unique_runs(records)
    assert (len(kept), excluded) == (3, [])
