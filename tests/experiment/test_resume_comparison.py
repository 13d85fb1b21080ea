"""What is said of made traces of a script that was stopped behind its second step, and started again."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from ampcompare.experiment.resume_comparison import (
    ResumeTrace,
    ResumptionAnswer,
    compare_traces,
    distance_of_last_losses,
    read_trace,
)
from ampcompare.settings.resume_trace import TraceRowKind

SAVE = {
    "kind": TraceRowKind.SAVE,
    "path": "/f/last.pt",
    "line": "train.py:9",
    "holds": ["model", "optimizer", "scaler"],
}
LOAD = {"kind": TraceRowKind.LOAD, "path": "/f/last.pt", "line": "train.py:3"}


def digests(text: str) -> dict[str, str]:
    return {"values": text, "bfloat16": f"{text} in bf16", "float16": f"{text} in fp16"}


def start(step: int) -> dict[str, Any]:
    return {
        "weights": {"a": digests(f"a{step}"), "b": digests(f"b{step}")},
        "buffers": {},
        "masters": {},
        "moments": {"a": {"exp_avg": digests(f"m{step}"), "step": digests(str(step))}},
        "scales": [[2.0**step, 0.0]],
        "rates": [0.1],
        "generators": {"torch": f"g{step}"},
    }


def rows(steps: range, *others: dict[str, Any]) -> list[dict[str, Any]]:
    found = [*others]
    for step in steps:
        found += [
            {"kind": TraceRowKind.START, "state": start(step), "made": {"optimizer": [0, 1], "scaler": [0]}},
            {"kind": TraceRowKind.BATCH, "batch": f"x{step}"},
            {"kind": TraceRowKind.LOSS, "loss": 1.0 / (1 + step)},
            {"kind": TraceRowKind.STEP},
        ]
    return [{"step": 0, **row} for row in found]


def trace(folder: Path, *given: list[dict[str, Any]]) -> ResumeTrace:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for part in given for row in part), encoding="utf-8")
    return read_trace(path)


@pytest.fixture
def traces(tmp_path: Path) -> tuple[ResumeTrace, ResumeTrace, ResumeTrace]:
    """The run without a break, the one that is stopped, and one that resumes exactly."""
    whole = trace(tmp_path, rows(range(5), SAVE))
    broken = trace(tmp_path, rows(range(2)), [{**SAVE, "step": 2}, {"kind": TraceRowKind.STOP, "step": 2}])
    return whole, broken, trace(tmp_path, rows(range(2, 5), LOAD))


def test_equal_steps_are_exact(traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace]) -> None:
    found = compare_traces(*traces)
    assert (found.answer, found.differences, found.stopped, found.steps) == (ResumptionAnswer.EXACT, (), 2, 5)
    assert found.parted == 0.0
    traces[2].steps[0].state["generators"]["torch"] = "another"
    found = compare_traces(*traces)
    assert found.answer is ResumptionAnswer.EXACT
    assert [one.role for one in found.differences] == ["generators"]


def test_a_script_that_starts_from_scratch_is_not_resumed(
    tmp_path: Path, traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace]
) -> None:
    for loads, cause in (
        ([], "the script loads none of its files: it needs arguments that name one, by --resume-args"),
        ([LOAD], "train.py:3 loads a file, and the weights are not those in it"),
    ):
        found = compare_traces(*traces[:2], trace(tmp_path, rows(range(5), *loads)))
        assert found.answer is ResumptionAnswer.NOT_RESUMED
        assert found.differences[0].cause == cause


def test_other_batches_alone_are_another_order(traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace]) -> None:
    whole, broken, resumed = traces
    for batch, cause in (
        ("x0", "the sampler starts its epoch again: these are the batches of step 1"),
        ("x4", "batches are left out: these are those of step 5"),
        ("new", "the sampler draws other batches: the generator that it draws from is not restored"),
    ):
        other = copy.deepcopy(resumed)
        other.steps[0].batches, other.steps[0].losses = [batch], [0.5]
        other.steps[1].state["weights"]["b"] = digests("else")
        found = compare_traces(whole, broken, other)
        assert found.answer is ResumptionAnswer.DATA_ORDER
        assert [(one.role, one.step) for one in found.differences] == [
            ("batches", 3),
            ("loss", 3),
            ("weights", 4),
        ]
        assert found.differences[0].cause == cause


def test_the_first_difference_comes_first_with_its_cause(
    traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace],
) -> None:
    whole, broken, resumed = traces
    state = resumed.steps[0].state
    state["moments"]["a"]["exp_avg"] = digests("m2 in bf16")
    state["scales"] = [[1.0, 0.0]]
    found = compare_traces(whole, broken, resumed)
    assert found.answer is ResumptionAnswer.DIFFERS
    assert [(one.role, one.step, one.what) for one in found.differences] == [
        ("moments", 3, "exp_avg of a"),
        ("loss scale", 3, "1 in place of 4"),
    ]
    assert found.differences[0].cause == "moments were saved or loaded in bf16 (train.py:9)"
    assert "is in the file, and is not loaded (train.py:3)" in found.differences[1].cause
    state["moments"]["a"] = {"exp_avg": digests("m2"), "step": digests("0")}
    assert (
        compare_traces(whole, broken, resumed).differences[0].cause
        == "the optimizer's count of steps starts again"
    )


def test_steps_that_are_left_are_counted(traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace]) -> None:
    whole, broken, resumed = traces
    resumed.steps.pop()
    found = compare_traces(whole, broken, resumed)
    assert found.answer is ResumptionAnswer.DIFFERS
    assert (found.differences[0].role, found.differences[0].what) == ("steps", "2 steps where 3 were left")
    assert distance_of_last_losses(whole, ResumeTrace()) is None


def test_tensors_of_an_earlier_step_tell_why(
    tmp_path: Path, traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace]
) -> None:
    whole, broken, resumed = traces
    resumed.steps[0].state["weights"]["b"] = digests("b1")
    found = compare_traces(whole, broken, resumed).differences[0]
    assert (found.role, found.what) == ("weights", "b")
    assert found.cause == "weights are those behind step 1: they were taken before step 2 (train.py:9)"
    broken.saves.insert(0, {**SAVE, "step": 1, "path": "/f/old.pt"})
    resumed.loads.append({**LOAD, "path": "/f/old.pt"})
    found = compare_traces(whole, broken, resumed).differences[0]
    assert found.cause == "an older file is loaded: old.pt, of step 1 (train.py:3)"
    resumed.steps[0].state["weights"]["b"] = digests("b0")
    found = compare_traces(whole, broken, resumed).differences[0]
    assert found.cause.startswith(
        "weights are those that the script starts with: they are not in the file, or are not"
    )
    resumed.steps[0].state["weights"]["b"] = digests("else")
    assert compare_traces(whole, broken, resumed).differences[0].cause == ""


def test_moments_of_other_parameters_and_of_another_type(
    traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace],
) -> None:
    whole, broken, resumed = traces
    of_b = {"exp_avg": digests("n"), "step": digests("2")}
    whole.steps[2].state["moments"]["b"] = of_b
    of_a = resumed.steps[0].state["moments"]["a"]
    resumed.steps[0].state["moments"] = {"a": of_b, "b": of_a}
    found = compare_traces(whole, broken, resumed).differences[0]
    assert (found.role, found.step) == ("moments", 3)
    assert found.cause.startswith("moments are those of other parameters")
    resumed.steps[0].state["moments"] = {
        "a": {**of_a, "exp_avg": {**of_a["exp_avg"], "dtype": "bfloat16"}},
        "b": of_b,
    }
    resumed.steps[1].state["weights"]["a"] = digests("else")
    found = compare_traces(whole, broken, resumed).differences[0]
    assert (found.role, found.step) == ("weights", 4)
    assert found.cause == "moments are in fp32 before the break, and in bf16 behind it"


def test_the_optimizer_of_a_number_is_not_loaded(
    traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace],
) -> None:
    whole, broken, resumed = traces
    name = "a of optimizer 2"
    whole.steps[2].state["moments"][name] = {"exp_avg": digests("n")}
    resumed.steps[0].state["moments"][name] = {}
    resumed.restored.append({"what": "optimizer", "number": 0, "line": "train.py:5"})
    found = compare_traces(whole, broken, resumed).differences[0]
    assert found.what == f"exp_avg of {name}"
    assert (
        found.cause
        == "optimizer 2 starts from scratch: its state is in the file, and is not loaded (train.py:3)"
    )
    resumed.restored.append({"what": "optimizer", "number": 1, "line": "train.py:6"})
    assert (
        compare_traces(whole, broken, resumed)
        .differences[0]
        .cause.endswith("though train.py:6 loads its state")
    )
    resumed.steps[0].made["optimizer"] = [0, 2]  # the second was replaced
    assert compare_traces(whole, broken, resumed).differences[0].cause == (
        "optimizer 2 starts from scratch: train.py:6 loads its state into another one, which is replaced then"
    )


def test_other_options_name_the_group_and_the_optimizer(
    traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace],
) -> None:
    whole, _, resumed = traces
    group = {"betas": [0.9, 0.999], "weight_decay": 0.01, "foreach": None}
    for one in (*whole.steps, *resumed.steps):
        one.state["options"] = [[group]]
    assert compare_traces(*traces).answer is ResumptionAnswer.EXACT
    resumed.steps[0].state["options"] = [[{**group, "weight_decay": 0.1, "of another optimizer": 1}]]
    at_first = resumed.steps[0].made
    found = compare_traces(*traces)
    assert found.answer is ResumptionAnswer.DIFFERS
    assert [(one.role, one.step, one.what) for one in found.differences] == [
        ("options", 3, "weight_decay: 0.1 in place of 0.01")
    ]
    assert found.differences[0].cause == (
        "options of optimizer 1 are others: its state is in the file, and is not loaded (train.py:3)"
    )
    at_first["optimizer"] = [0]
    resumed.restored.append({"what": "optimizer", "number": 0, "line": "train.py:5"})
    whole.steps[0].state["options"] = [[{**group, "weight_decay": 0.1}]]
    assert compare_traces(*traces).differences[0].cause == (
        "options of the optimizer are those that the script starts with, though train.py:5 loads its state"
    )
    whole.steps[2].state["options"] = [[group], [group, group]]
    resumed.steps[0].state["options"] = [[group], [group, {**group, "betas": [0.5, 0.999]}]]
    assert compare_traces(*traces).differences[0].what == (
        "betas of group 2 of optimizer 2: [0.5, 0.999] in place of [0.9, 0.999]"
    )


def test_other_samples_are_no_other_order(traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace]) -> None:
    whole, broken, resumed = traces
    for number, step in enumerate(whole.steps):
        step.samples = [f"s{number}", f"s{number + 5}"]
    for samples, answer, cause in (
        (
            ["s1", "s9"],
            ResumptionAnswer.DATA_ORDER,
            "the sampler draws other batches: the generator that it draws from is not",
        ),
        (
            ["s1", "new"],
            ResumptionAnswer.DIFFERS,
            "samples are others: generators from which a sampler or an augmentation draws",
        ),
    ):
        other = copy.deepcopy(resumed)
        other.steps[0].batches, other.steps[0].samples = ["new"], samples
        other.steps[0].state["generators"] = {"torch": "lost"}
        found = compare_traces(whole, broken, other)
        assert found.answer is answer
        assert found.differences[0].cause.startswith(cause)


def test_a_loss_scale_of_the_script(traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace]) -> None:
    *others, resumed = traces
    loss = resumed.steps[1].losses[0]
    assert loss is not None
    for factor, cause in (
        (0.5, "the loss is 0.5 times as large: a loss scale of the script's own is not the"),
        (0.9, ""),
    ):
        resumed.steps[1].losses = [factor * loss]
        found = compare_traces(*others, resumed)
        assert [(one.role, one.step) for one in found.differences] == [("loss", 4)]
        assert found.differences[0].cause.startswith(cause)
        assert bool(found.differences[0].cause) is bool(cause)


def test_the_most_telling_tensor_is_named(traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace]) -> None:
    whole, broken, resumed = traces
    names = ("1.num_batches_tracked of model 2", "1.running_mean of model 2")
    for one, text in ((whole.steps[2], "due"), (resumed.steps[0], "lost")):
        one.state["buffers"] = {name: digests(text) for name in names}
        one.state["moments"] = {
            "a": {"step": digests(text), "exp_avg": digests(text)},
            "b": {"step": digests(text)},
        }
    found = compare_traces(whole, broken, resumed).differences
    assert [one.what for one in found] == ["1.running_mean of model 2", "exp_avg of a"]


def test_a_scaler_that_is_made_behind_the_load(traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace]) -> None:
    whole, broken, resumed = traces
    resumed.steps[0].state["scales"] = [[1.0, 0.0]]
    resumed.restored.append({"what": "scaler", "number": 0, "line": "train.py:5"})
    found = compare_traces(whole, broken, resumed).differences[0]
    assert found.cause == "the GradScaler starts from scratch, though train.py:5 loads its state"
    resumed.steps[0].made["scaler"] = [1]
    found = compare_traces(whole, broken, resumed).differences[0]
    assert (found.role, found.what) == ("loss scale", "1 in place of 4")
    assert found.cause == (
        "the GradScaler starts from scratch: train.py:5 loads its state into another one, which is replaced then"
    )


def test_a_schedule_at_another_step(traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace]) -> None:
    whole, broken, resumed = traces
    for at, step in enumerate(whole.steps):
        step.state["rates"] = [0.5**at]
    for at, step in enumerate(resumed.steps):
        step.state["rates"] = [0.5 ** (at + 4)]
    found = compare_traces(whole, broken, resumed).differences[0]
    assert (found.role, found.step) == ("learning rate", 3)
    assert found.cause == "the schedule is 2 steps ahead: its state is not in the file (train.py:9)"
    resumed.restored.append({"what": "scheduler", "number": None, "line": "train.py:5"})
    broken.saves[0]["holds"] = ["scheduler"]
    found = compare_traces(whole, broken, resumed).differences[0]
    assert (
        found.cause
        == "the schedule is 2 steps ahead: it is stepped again behind train.py:5, which loads its state"
    )
    for at, step in enumerate(resumed.steps):
        step.state["rates"] = [0.5 ** (at + 1)]
    found = compare_traces(whole, broken, resumed).differences[0]
    assert found.cause == "the schedule is 1 step behind, though train.py:5 loads its state"
    for at, step in enumerate(resumed.steps):
        step.state["rates"] = [0.3 + at]
    found = compare_traces(whole, broken, resumed).differences[0]
    assert found.cause == "the schedule has another state, though train.py:5 loads its state"


def test_statistics_are_in_the_file_or_not(traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace]) -> None:
    whole, broken, resumed = traces
    for step in (*whole.steps, *resumed.steps):
        step.state["buffers"] = {"norm.running_mean": digests("first" if step is whole.steps[0] else "later")}
    resumed.steps[0].state["buffers"] = {"norm.running_mean": digests("first")}
    head = "buffers are those that the script starts with: they are "
    assert (
        compare_traces(whole, broken, resumed).differences[0].cause == f"{head}not in the file (train.py:9)"
    )
    broken.saves[0]["holds"] = ["buffers", "model"]
    assert (
        compare_traces(whole, broken, resumed).differences[0].cause
        == f"{head}in the file, and are not loaded (train.py:3)"
    )


def test_a_count_is_known_by_the_first_batches_or_the_learning_rates(tmp_path: Path) -> None:
    broken = trace(tmp_path, rows(range(2)), [{**SAVE, "step": 2}, {"kind": TraceRowKind.STOP, "step": 2}])
    for rates in (False, True):
        whole, resumed = trace(tmp_path, rows(range(5), SAVE)), trace(tmp_path, rows(range(2, 6), LOAD))
        for at, step in enumerate(whole.steps):
            step.state["rates"] = [0.5**at if rates else 0.1]
            step.batches = ["same" if rates else f"x{at}", f"noise {at}"]
        for at, step in enumerate(resumed.steps):
            step.state["rates"] = [0.5 ** (at + 1) if rates else 0.1]
            step.batches = ["same" if rates else f"x{at + 1}", f"noise {at + 2}"]
        found = compare_traces(whole, broken, resumed)
        assert found.answer is ResumptionAnswer.DIFFERS
        assert found.differences[0].role == "steps"
        assert (
            found.differences[0].cause
            == "step 2 is made again: the count of steps, or the place in the epoch, is off by one"
        )


def test_a_step_that_was_half_made_has_lost_its_gradients(
    traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace],
) -> None:
    whole, broken, resumed = traces
    whole.steps[2].batches = ["first", "second"]
    resumed.steps[0].batches = ["second"]
    resumed.steps[0].state["rates"] = [0.2]
    found = compare_traces(whole, broken, resumed).differences
    assert [(one.role, one.step, one.what) for one in found] == [
        ("steps", 3, "1 of 2 forward passes left out")
    ]
    assert "gradients that were accumulated by then are not in the file (train.py:9)" in found[0].cause


def test_a_schedule_whose_first_rate_the_optimizer_restores(
    traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace],
) -> None:
    whole, broken, resumed = traces
    for at, step in enumerate(whole.steps):
        step.state["rates"] = [0.1 * at]
    for step, rate in zip(resumed.steps, (0.2, 0.1, 0.2), strict=True):
        step.state["rates"] = [rate]
    found = compare_traces(whole, broken, resumed).differences[0]
    assert (found.role, found.step) == ("learning rate", 4)
    assert found.cause == "the schedule starts from scratch: its state is not in the file (train.py:9)"


def test_moments_that_load_state_dict_gives_the_type_of_the_weights(
    traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace],
) -> None:
    whole, broken, resumed = traces
    state = resumed.steps[0].state
    state["moments"]["a"]["exp_avg"] = {**digests("m2 in bf16"), "dtype": "bfloat16"}
    resumed.restored.append({"what": "optimizer", "number": 0, "line": "train.py:5"})
    found = compare_traces(whole, broken, resumed).differences[0]
    assert found.cause == "moments were saved or loaded in bf16 (train.py:9)"  # the weights are fp32
    state["weights"]["a"]["dtype"] = "bfloat16"
    found = compare_traces(whole, broken, resumed).differences[0]
    assert found.cause == (
        "moments are rounded to bf16 at load: load_state_dict gives them the type of the weights (train.py:5)"
    )


def test_weights_of_an_average_and_a_loss_scaler_of_apex(
    traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace],
) -> None:
    whole, broken, resumed = traces
    for step, together in ((whole.steps[2], "w"), (resumed.steps[0], "e")):
        step.state["averages"], step.state["together"] = {"ema": {"values": "e"}}, [together]
    resumed.steps[0].state["weights"]["a"] = digests("else")
    resumed.steps[0].state["scales"] = [[1.0, 0.0]]
    resumed.restored.append({"what": "scaler", "number": None, "line": "train.py:5"})
    found = {one.role: one.cause for one in compare_traces(whole, broken, resumed).differences}
    assert found["weights"] == "weights are those of the average ema (train.py:3)"
    assert found["loss scale"] == "the GradScaler starts from scratch, though train.py:5 loads its state"


def test_a_script_that_fails_in_its_first_step(
    tmp_path: Path, traces: tuple[ResumeTrace, ResumeTrace, ResumeTrace]
) -> None:
    whole, broken, _ = traces
    resumed = trace(tmp_path, rows(range(2, 3), LOAD)[:-2])
    assert (resumed.steps, resumed.last is not None) == ([], True)
    resumed.note_error("RuntimeError")
    assert compare_traces(whole, broken, resumed).answer is ResumptionAnswer.EXACT  # as far as it came
    resumed.steps[0].state["moments"]["a"]["exp_avg"] = digests("m2 in bf16")
    found = compare_traces(whole, broken, resumed).differences
    assert [(one.role, one.step) for one in found] == [("moments", 3)]
