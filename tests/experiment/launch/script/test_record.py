"""From the rows of a script's process to the record of its cell."""

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from ampcompare.experiment.launch.script.launcher import (
    metric_value_that_counts,
    script_command,
    script_record,
)
from ampcompare.experiment.launch.script.output import OutputReader, PrintedValue
from ampcompare.experiment.launch.script.rows import ScriptRows, read_script_rows
from ampcompare.results.analysis.pairing.learning import why_run_learned_nothing
from ampcompare.settings.config import RunConfig
from ampcompare.settings.script import ScriptConfig, ScriptMetric, parse_metric


def rows_of(tmp_path: Path, *rows: dict[str, Any]) -> ScriptRows:
    path = tmp_path / "script.jsonl"
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in ({"format": "ampcompare-exec"}, *rows)) + '{"cut'
    )
    return read_script_rows(path)


def backward(loss: Any, loss_id: int = 0, scale: Any = None) -> dict[str, Any]:
    return {"kind": "backward", "loss": loss, "loss_id": loss_id, "scale_before": scale, "scale_after": scale}


def step(optimizer: int = 0, applied: bool = True, seconds: float | None = 0.1) -> dict[str, Any]:
    return {"kind": "step", "optimizer": optimizer, "applied": applied, "seconds": seconds}


def config_of(*metrics: str, arm: str = "fp32", **settings: Any) -> RunConfig:
    given = [text if ":m" in text else re.sub("^[^:=]+", r"\g<0>:max", text) for text in metrics]
    script = ScriptConfig(name="train.py", metrics=tuple(map(parse_metric, given)))
    return RunConfig(arm=arm, script=script, warmup_steps=1, **settings)


def record_of(config: RunConfig, rows: ScriptRows, **printed: list[float]) -> Any:
    return script_record(config, rows, printed, wall_seconds=9.0, started="2026-01-01T00:00:00+00:00")


def test_updates_take_turns(tmp_path: Path) -> None:
    """Losses belong to the step after them; an update has one step of each optimizer that takes turns."""
    turn = [backward(1.0), backward(2.0), step(0, seconds=None), backward(4.0), step(1, applied=False)]
    rows = rows_of(tmp_path, *turn, *turn)
    assert [(one.step, one.loss, one.losses, one.applied) for one in rows.steps] == [
        (0, 7.0, (3.0, 4.0), (True, False)),
        (1, 7.0, (3.0, 4.0), (True, False)),
    ]


@pytest.mark.parametrize(
    ("optimizers", "steps"),
    [
        ("00011", [(0,), (0,), (0,), (1,), (1,)]),  # a second training
        ("01012323", [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ("0001", [(0,), (0,), (0, 1)]),  # one step alone, as behind the end of a script that catches it
        ("0001010", [(0,), (0,), (0, 1), (0, 1), (0,)]),  # one that begins late, and takes turns
        ("01", [(0, 1)]),
    ],
)
def test_an_optimizer_in_the_place_of_another_begins_an_update(
    tmp_path: Path, optimizers: str, steps: list[tuple[int, ...]]
) -> None:
    """No step is lost where a script trains again; the losses tell which optimizers share an update."""
    rows = rows_of(tmp_path, *[row for one in optimizers for row in (backward(float(one)), step(int(one)))])
    assert [one.losses or (one.loss,) for one in rows.steps] == steps


def test_a_loss_that_nothing_scales_counts_alone(tmp_path: Path) -> None:
    """Next to a scaled one it does not: the record has the loss that the arm acts on."""
    plain = {"kind": "plain_backward", "loss": 5.0}
    rows = rows_of(
        tmp_path, backward(1.0), plain, step(), plain, plain, step(), {"kind": "note", "text": "one scale"}
    )
    assert [one.loss for one in rows.steps] == [1.0, 10.0]
    assert rows.script_facts().notes == ["one scale"]


def test_losses_that_nobody_has_seen_are_no_divergence(tmp_path: Path) -> None:
    """A script that sets gradients by hand has none: its metric counts, and without one it is told to name one."""
    unknown = rows_of(tmp_path, *[row for _ in range(12) for row in (backward(None), step())])
    failed = record_of(config_of(), unknown)
    assert (failed.status, "--metric NAME=REGEX" in failed.error) == ("failed", True)
    record = record_of(config_of("acc=acc (.*)"), unknown, acc=[0.5])
    assert (record.status, record.summary.metric_final, record.summary.loss_tail) == ("completed", 0.5, None)
    assert why_run_learned_nothing(record) == ""
    lost = record_of(
        config_of(), rows_of(tmp_path, *[row for _ in range(12) for row in (backward(math.nan), step())])
    )
    assert lost.status == "diverged"


def test_places_of_equal_numbers_are_in_the_record(tmp_path: Path) -> None:
    """Next to the remark, which is for readers."""
    place = {"kind": "equal_numbers", "place": "train.py:41"}
    record = record_of(config_of(), rows_of(tmp_path, backward(1.0), step(), place))
    assert record.script.equal_numbers == ["train.py:41"]


def test_the_default_metric_is_the_training_loss(tmp_path: Path) -> None:
    """It is the mean over the last tenth of the steps; the record agrees with itself."""
    rows = rows_of(
        tmp_path, *[row for loss in range(20) for row in (backward(float(loss), scale=8.0), step())]
    )
    record = record_of(config_of(), rows)
    assert (record.status, record.summary.metric_final, record.metric.better) == ("completed", 18.5, "lower")
    assert (record.summary.num_steps, record.summary.final_loss_scale) == (20, 8.0)
    assert record.summary.step_seconds_median == pytest.approx(0.1)
    assert (record.summary.loss_tail, record.summary.loss_tail_steps) == (17.5, 4)


def test_metrics_are_printed_or_logged(tmp_path: Path) -> None:
    """The first is that of verdicts; one that was never seen fails the cell, and names what was."""
    rows = rows_of(
        tmp_path,
        backward(1.0),
        step(),
        {"kind": "metric", "name": "f1", "value": 0.5, "source": "wandb.log"},
        {"kind": "weights", "sha256": "a"},
        {"kind": "batches", "sha256": ["b"]},
    )
    config = config_of(r"top1:max:best=Acc ([\d.]+)", "f1")
    record = record_of(config, rows, top1=[90.0, 93.0, 92.0])
    assert (record.summary.metric_final, record.summary.others_final) == (93.0, {"f1": 0.5})
    assert (record.script.weights, record.script.batches) == (["a"], ["b"])
    assert "no line of the script's output" in record_of(config, rows, top1=[]).error
    failed = record_of(config_of("f2"), rows)
    assert (failed.status, failed.error.partition(";")[0]) == ("failed", "the script never logged metric f2")
    assert failed.metrics[0].name == "f2"


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [([1.0, math.nan, 1.0, *["nan"] * 10, 1.0], 3), ([1.0, "nan", "nan"], 1), ([1.0, 1.0, "inf"], None)],
)
def test_losses_that_stay_non_finite_are_divergence(
    tmp_path: Path, losses: list[Any], diverged: int | None
) -> None:
    """So many in a row, as in our loop, or at the end; a single one may be a step that the scale skips."""
    record = record_of(
        config_of(), rows_of(tmp_path, *[row for loss in losses for row in (backward(loss), step())])
    )
    assert (record.status, record.summary.diverged_step) == (
        "completed" if diverged is None else "diverged",
        diverged,
    )
    assert (record.summary.metric_final is None) == (diverged is not None)


def test_one_of_several_values_is_picked() -> None:
    """Best follows the goal, and no NaN is best."""
    values = [2.0, math.nan, 1.0, 3.0]
    assert metric_value_that_counts(ScriptMetric(name="a", goal="min", pick="best"), values) == 1.0
    assert metric_value_that_counts(ScriptMetric(name="a", pick="first"), values) == 2.0
    assert metric_value_that_counts(ScriptMetric(name="a"), values) == 3.0


def test_output_is_read_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines end by newline or carriage return; the log stays below its bound, and is read to the end."""
    limit = 2**20
    monkeypatch.setattr("ampcompare.experiment.launch.script.output.MAX_LOG_BYTES", limit)
    noise = b"x" * 2**16 + b"\n"
    text = b"Acc 1.5\rAcc 2.5 Acc oops\n" + noise * (limit // len(noise) + 2) + b"Acc 3.5%"
    reader = OutputReader(
        io.BufferedReader(io.BytesIO(text)), tmp_path / "log.txt", [parse_metric(r"a:max=Acc (\S+)")]
    )  # type: ignore[arg-type]
    reader.read_to_end()
    assert reader.values == {"a": [1.5, 2.5, 3.5]}
    assert (tmp_path / "log.txt").stat().st_size < limit + 100


def read(tmp_path: Path, pattern: str, text: str) -> OutputReader:
    pipe = io.BufferedReader(io.BytesIO(text.encode()))  # type: ignore[arg-type]
    reader = OutputReader(pipe, tmp_path / "log.txt", [ScriptMetric(name="a", pattern=pattern)])
    reader.read_to_end()
    return reader


@pytest.mark.parametrize(
    ("pattern", "text", "values"),
    [
        (r"ppl ([\d.]+)", "ppl 3.5\nppl nan\nppl inf\nppl -INF\n", [3.5, math.nan, math.inf, -math.inf]),
        (r"a ([\d.]+)%", "a 93.5%\na nan%", [93.5, math.nan]),
        (r"a ([\d.]+)", "a 10.0\na  9.0\na  nan\nb  4.0\n", [10.0, 9.0, math.nan]),  # `{:4.1f}`
        (r"a ([\d.]+)", "a 1.5\na -1.#IND\na 1.#INF00\n", [1.5, math.nan, math.inf]),
        (r"a=([\d.]+)", "a=\x1b[32m1.5\x1b[0m\na=\x1b[1;31mnan\x1b[0m\n", [1.5, math.nan]),
        (
            r"loss: ([\d.]+)",
            "loss: 1.5e-05\nloss: 2.5E-3\nloss: .5\nloss: -0.5\n",
            [1.5e-5, 2.5e-3, 0.5, -0.5],
        ),
        (r"acc.*([\d.]+)", "acc 0.15", [0.15]),
        (r"n (?P<n>[\d,.]+)", "n 1,234.5, n 12", [1234.5, 12.0]),
        (r"info ([\d.]+)", "info 2 information nano inform", [2.0]),
        (r"a (\d+)", "a information", []),
        (r"[(\])a\(] (\d+)", "( 5", [5.0]),
        (r"epoch (\d+)/(?:\d+)", "epoch 3/10", [3.0]),
        (r"^(\d+),\d", "5,100", [5.0]),
        (r"a (\d+\.\d+)", "a 0.5 a 0.6", [0.5, 0.6]),
    ],
)
def test_a_value_is_read_whole(tmp_path: Path, pattern: str, text: str, values: list[float]) -> None:
    """Whatever the pattern's group thinks a number is: nan, a sign, an exponent, separators."""
    reader = read(tmp_path, pattern, text)
    assert list(map(repr, map(float, reader.values["a"]))) == list(map(repr, values))
    assert not reader.parts


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("n 1'234.5", "1'234"),
        ("n 9\u202f000", "9\u202f000"),
        ("n 0,93", "0,93"),
        ("n 0x1.8p+6", "0x1"),
        ("n 1.5d-3", "1.5d-3"),
    ],
)
def test_a_number_in_another_notation_is_not_cut(tmp_path: Path, text: str, whole: str) -> None:
    """Else 0,93 and 0,91 are both 0, and equal."""
    reader = read(tmp_path, r"n ([\d.]+)", f"{text}\n")
    assert reader.parts["a"][1] == whole
    assert f"of {whole}, which may be one number" in reader.faults_of_matched_values()["a"]
    assert not read(
        tmp_path, r"n ([\d.]+)", "n 3,0.51,90\nn 3, 5\nn \u200b9\u200b0.5\n"
    ).faults_of_matched_values()


@pytest.mark.parametrize("pattern", [r"n ([\d.]+)", r"n (\S+)"])
def test_numbers_of_several_units_are_no_metric(tmp_path: Path, pattern: str) -> None:
    """0.93 and 91% are a factor of 100 apart, 900ms and 1.2s one of 1000."""
    assert not read(tmp_path, pattern, "n 93%\nn nan\nn 91.5%\nn 1e-05%\n").faults_of_matched_values()
    fault = read(tmp_path, pattern, "n 0.93\nn 91%\n").faults_of_matched_values()["a"]
    assert (
        fault
        == "metric a: its numbers have several units, 0.93 and 91%; let its pattern match one of them only"
    )
    assert (
        "900ms and 1.2s" in read(tmp_path, r"n ([\d.]+)", "n 900ms\nn 1.2s\n").faults_of_matched_values()["a"]
    )


def test_a_part_of_a_number_is_no_value(tmp_path: Path) -> None:
    """Whether 1,234.5 is one number cannot be known, so the cell fails and says what to write."""
    reader = read(tmp_path, r"n ([\d.]+)", "n 1,234.5\n")
    rows = rows_of(tmp_path, backward(1.0), step())
    record = script_record(
        config_of(r"a=n ([\d.]+)"),
        rows,
        reader.values,
        wall_seconds=1.0,
        started="",
        faults=reader.faults_of_matched_values(),
    )
    assert record.error.startswith("metric a: its pattern takes 1 of 1,234.5, which may be one number")


@pytest.mark.parametrize(
    ("words", "values", "status", "final"),
    [
        ("a", ["3.50", "nan"], "diverged", None),
        ("a:min:best", ["3.50", "inf"], "diverged", None),
        ("a:min:best", ["inf", "3.50"], "completed", 3.5),
        ("a:first", ["3.50", "nan"], "completed", 3.5),
    ],
)
def test_a_metric_that_ends_as_no_number_diverged(
    tmp_path: Path, words: str, values: list[str], status: str, final: float | None
) -> None:
    """The last finite value does not stand for it; digits and number of values are kept."""
    rows = rows_of(tmp_path, backward(1.0), step())
    record = record_of(config_of(rf"{words}=a ([\d.]+)"), rows, a=[PrintedValue(value) for value in values])
    assert (record.status, record.summary.metric_final, record.script.seen) == (status, final, {"a": 2})
    assert record.script.printed == {"a": 0.01 if math.isfinite(record.summary.epochs[0].value) else 0.0}


def test_ranks_that_write_into_one_pipe_are_kept_apart(tmp_path: Path) -> None:
    """Rank 0's values count, with a note where others differ; without it ranks that differ fail the cell."""
    text = "".join(
        f"\x1e{rank}\x1f{part}\x1d" for rank, part in [(0, "a "), (1, "a 50\n"), (0, "90\n"), (1, "a 5")]
    )
    reader = read(tmp_path, r"a (\d+)", text + "plain\n")
    assert [(float(value), value.rank) for value in reader.values["a"]] == [(50.0, 1), (90.0, 0), (5.0, 1)]  # type: ignore[attr-defined]
    assert (tmp_path / "log.txt").read_text() == "a 50\na 90\nplain\na 5"
    rows = rows_of(tmp_path, backward(1.0), step())
    record = record_of(config_of(r"a=a (\d+)"), rows, a=reader.values["a"])
    assert record.summary.metric_final == 90.0
    assert record.script.notes == [
        "rank 0 and rank 1 printed different values of a (90 and 5 in the end), and rank 0's count"
    ]
    others = [PrintedValue("50", 1), PrintedValue("60", 2)]
    assert record_of(config_of(r"a=a (\d+)"), rows, a=others).error.startswith(
        "rank 1 and rank 2 printed different"
    )
    assert (
        record_of(
            config_of(r"a=a (\d+)"), rows, a=[PrintedValue("5", 1), PrintedValue("5", 2)]
        ).summary.metric_final
        == 5.0
    )


def test_a_value_of_no_rank_is_noted_where_there_are_several(tmp_path: Path) -> None:
    """What C code prints may be any rank's; what is logged is one process's."""
    for size in (1, 2):
        rows = rows_of(tmp_path, {"kind": "rank", "rank": 0, "world_size": size}, backward(1.0), step())
        record = record_of(config_of(r"a=a (\d+)"), rows, a=[PrintedValue("5"), PrintedValue("6")])
        assert [note.partition(",")[0] for note in record.script.notes] == ["a was printed by C code"] * (
            size - 1
        )


def test_a_progress_bar_is_not_counted(tmp_path: Path) -> None:
    """How often it is drawn depends on the machine; its last value still counts."""
    values = read(tmp_path, r"a (\d+)", "a 1\ra 2\ra 3\n").values["a"]
    record = record_of(config_of(r"a=a (\d+)"), rows_of(tmp_path, backward(1.0), step()), a=values)
    assert (record.summary.metric_final, record.script.seen) == (3.0, {"a": 1})


def test_the_command_of_a_cell(tmp_path: Path) -> None:
    """Options stand before the script, its arguments behind; torchrun starts several processes, or one if asked."""
    script = ScriptConfig(name="pkg.train", is_module=True, arguments=("--x", "{seed}"), max_steps=5)
    words = script_command(RunConfig(arm="bf16", device="cpu", script=script), script, tmp_path)
    assert words[words.index("exec") + 1 :] == [
        *("--engine", "compat", "--arm", "native:bf16", "--seed", "0", "--max-steps", "5"),
        *("--guard-passes", "10", "--device", "cpu", "--record", str(tmp_path / "script.jsonl")),
        *("-m", "pkg.train", "--x", "0"),
    ]
    several = script_command(RunConfig(processes=2, script=script), script, tmp_path)
    assert several[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    alone = script.model_copy(update={"torchrun": True})
    assert script_command(RunConfig(script=alone), alone, tmp_path)[1:8] == [
        *several[1:5],
        "1",
        "-m",
        "ampcompare",
    ]


def test_output_is_read_to_its_end_where_the_log_has_no_room() -> None:
    """Else the script would block, or be killed, at its next line."""
    text = b"".join(b"acc %d\n" % number for number in range(20000))
    pipe = io.BufferedReader(io.BytesIO(text))  # type: ignore[arg-type]
    reader = OutputReader(pipe, Path("/dev/full"), [parse_metric(r"a:max=acc (\S+)")])
    reader.read_to_end()
    assert reader.values == {"a": [float(number) for number in range(20000)]}
