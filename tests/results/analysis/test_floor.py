"""Envelopes of a training, and new steps judged by them."""

import random
from pathlib import Path

import pytest

from ampcompare.base.errors import UnusableInput
from ampcompare.results.analysis.floor import (
    Envelope,
    is_envelope,
    judge_step_rows,
    make_envelope,
    read_envelope,
    read_step_rows,
)

STEPS = 50
Rows = list[dict[str, float | None]]


def _rows(noise: float, growth: float = 1.0, seed: int = 0) -> Rows:
    """Return a falling loss with noise that grows with the steps, as a twin's does."""
    drawn = random.Random(seed)
    rows: Rows = []
    for step in range(STEPS):
        moved = 1 + drawn.gauss(0, noise) * growth**step
        rows.append({"loss": (2.0 * 0.98**step + 0.1) * moved, "grad_norm": 1.0 * moved})
    return rows


@pytest.fixture
def envelope() -> Envelope:
    twins = {f"twin {seed}": _rows(1e-7, 1.1, seed) for seed in range(1, 5)}
    return make_envelope(_rows(0.0), {**twins, "failed": None}, script="train.py")


def test_the_training_itself_is_identical(envelope: Envelope) -> None:
    found = judge_step_rows(_rows(0.0), envelope)
    assert (found.answer, found.exit_code) == ("identical", 0)


def test_other_twins_are_within_the_floor(envelope: Envelope) -> None:
    answers = [judge_step_rows(_rows(1e-7, 1.1, seed), envelope).answer for seed in range(10, 50)]
    assert answers.count("within the floor") == 40


@pytest.mark.parametrize("first", [0, 7, 30])
def test_a_fault_is_found_at_its_first_step(first: int, envelope: Envelope) -> None:
    rows = _rows(1e-7, 1.1, 9)
    for row in rows[first:]:
        row["loss"] = (row["loss"] or 0.0) * 1.001
    found = judge_step_rows(rows, envelope)
    assert (found.answer, found.step, found.quantity, found.exit_code) == (
        "outside of the floor",
        first,
        "loss",
        1,
    )


def test_a_gradient_alone_is_found(envelope: Envelope) -> None:
    rows = [{**row, "grad_norm": 1.01 * (row["grad_norm"] or 0.0)} for row in _rows(0.0)]
    assert judge_step_rows(rows, envelope).quantity == "grad_norm"


def test_a_loss_that_is_not_finite_is_outside(envelope: Envelope) -> None:
    rows = _rows(1e-7, 1.1, 9)
    rows[20]["loss"] = float("nan")
    assert judge_step_rows(rows, envelope).step == 20


def test_twins_that_part_tell_nothing() -> None:
    apart = make_envelope(_rows(0.0), {"twin": _rows(0.5, 1.0, 1)})
    found = judge_step_rows(_rows(0.01, 1.0, 2), apart)
    assert (found.answer, found.exit_code) == ("cannot tell", 2)


def test_other_numbers_of_steps_tell_nothing(envelope: Envelope) -> None:
    assert judge_step_rows(_rows(1e-7, 1.1, 9)[:20], envelope).answer == "cannot tell"
    assert judge_step_rows([], envelope).answer == "cannot tell"


def test_files(envelope: Envelope, tmp_path: Path) -> None:
    path = tmp_path / "floor.json"
    path.write_text(envelope.to_json())
    assert is_envelope(path)
    assert read_envelope(path) == envelope
    rows = tmp_path / "steps.jsonl"
    rows.write_text('{"step": 0, "loss": 1.5, "grad_norm": null}\n{"step": 1, "loss": "nan"}\n')
    assert [repr(row["loss"]) for row in read_step_rows(rows)] == ["1.5", "nan"]
    assert not is_envelope(rows)
    for text in ("", "1\n", '{"step": 0}\n', "loss 1.5\n"):
        rows.write_text(text)
        with pytest.raises(UnusableInput):
            read_step_rows(rows)
