"""Judgments of a step from what both sides wrote: lines, and which module is named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ampcompare.results.analysis.replay import judge_replay
from ampcompare.results.report.documents.replay import replay_document
from ampcompare.results.report.terminal import Terminal

UNIT = 2.0**-24


def _row(name: str, parts: dict[str, Any] | None = None, top: str = "Net", **more: Any) -> dict[str, Any]:
    entry = {"error": 1e-7, "moved": UNIT, "unit": UNIT, "same": 0.0}
    own = {"fwd": {"0": entry}, "wgrad": {"weight": entry}} if parts is None else parts
    return {"module": name, "kind": "Linear", "call": 0, "top": top, "parts": own, **more}


def _entry(**values: float) -> dict[str, Any]:
    return {"fwd": {"0": {"error": 1e-7, "moved": UNIT, "unit": UNIT, "same": 0.0, **values}}}


def _side(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rows": list(rows), "notes": [], **more}


BASE = _side(_row("Net"), _row("a"), _row("a.b"))


def test_a_factor_between_two_errors_is_no_finding() -> None:
    """Another order of a sum makes forty times the error of the base, as convolutions have shown."""
    found = judge_replay("onednn=off", BASE, _side(_row("Net"), _row("a", _entry(error=4e-6)), _row("a.b")))
    assert (found.answer, found.exit_code, list(found.findings)) == ("noise", 0, [])


@pytest.mark.parametrize("error", [4e-4, 2e-3, math.inf])
def test_narrow_types_are_less_exact(error: float) -> None:
    found = judge_replay("tf32=on", BASE, _side(_row("Net"), _row("a"), _row("a.b", _entry(error=error))))
    assert (found.answer, found.exit_code, found.module_names) == ("less exact", 1, ["a.b"])


def test_the_lowest_module_is_named() -> None:
    differs = _entry(same=5e-6)
    found = judge_replay("x", BASE, _side(_row("Net", differs), _row("a", differs), _row("a.b", differs)))
    assert (found.module_names, list(found.above)) == (["a.b"], ["Net", "a"])
    found = judge_replay("x", BASE, _side(_row("Net", differs), _row("a", differs), _row("a.b")))
    assert (found.module_names, list(found.above)) == (["a"], ["Net"])


def test_a_less_exact_child_does_not_explain_another_function() -> None:
    rows = _side(_row("Net"), _row("a", _entry(same=1e-3)), _row("a.b", _entry(error=1e-3)))
    found = judge_replay("x", BASE, rows)
    assert (found.answer, found.module_names) == ("another function", ["a", "a.b"])


def test_a_gradient_that_cancels_out_is_noise() -> None:
    """The bias before a batch norm has the gradient 0: what is computed for it are roundings, also in fp64."""
    moved = {"moved": 1e9, "error": 3e9, "same": 3.0}
    base = _side(_row("Net", _entry(moved=1e9, error=1e9)))
    assert judge_replay("x", base, _side(_row("Net", _entry(**moved)))).answer == "noise"


def test_16_bits_have_their_own_line() -> None:
    half = {"unit": 2.0**-9, "moved": 2.0**-9}
    base = _side(_row("Net", _entry(error=2e-3, **half)))
    assert judge_replay("x", base, _side(_row("Net", _entry(error=6e-3, **half)))).answer == "noise"
    assert judge_replay("x", base, _side(_row("Net", _entry(error=3e-2, **half)))).answer == "less exact"


def test_what_has_no_answer() -> None:
    missing = {"module": "a", "kind": "Linear", "call": 0, "top": "Net", "why": "RuntimeError: no fp64"}
    found = judge_replay("x", BASE, _side(_row("Net"), missing, _row("a.b")))
    assert (found.answer, dict(found.unjudged)) == ("noise", {"a": "RuntimeError: no fp64"})
    assert "a is not judged: RuntimeError: no fp64" in Terminal(100).document_text(replay_document([found]))
    for base, changed in (
        ({"fault": "it failed"}, BASE),
        (BASE, {"fault": "it failed"}),
        (BASE, _side(missing)),
    ):
        assert judge_replay("x", base, changed).exit_code == 3


def test_an_update_alone_does_not_tell() -> None:
    """As where the one model of a script could not be compiled."""
    failed = {"module": "Net", "kind": "Net", "call": 0, "top": "Net", "why": "RuntimeError: it failed"}
    update = _row("(AdamW)", {"update": {"a": _entry()["fwd"]["0"]}}, top="")
    found = judge_replay("compile=inductor", BASE, _side(failed, update))
    assert (found.answer, found.exit_code) == ("cannot tell", 3)
    assert found.why == "no module could be judged: Net: RuntimeError: it failed"


def test_without_an_update_it_cannot_be_told() -> None:
    update = {"module": "(AdamW)", "kind": "AdamW", "call": 0, "top": "", "why": "RuntimeError: it failed"}
    found = judge_replay("x", BASE, _side(*BASE["rows"], update))
    assert (found.answer, found.why) == (
        "cannot tell",
        "modules are the same, but not judged is (AdamW): RuntimeError: it failed",
    )
    differs = _side(_row("Net"), _row("a"), _row("a.b", _entry(same=1e-3)), update)
    assert judge_replay("x", BASE, differs).module_names == ["a.b"]


def test_a_loss_is_not_named_for_its_module() -> None:
    base = _side(_row("Net"), _row("Loss", _entry(), top="Loss"))
    loss = _row("(loss)", {"fwd": {"loss": {"error": 0.5, "moved": 0.0, "unit": UNIT}}}, top="")
    other = _side(_row("Net"), _row("Loss", _entry(same=0.5), top="Loss"), loss)
    assert judge_replay("x", base, other).module_names == ["Loss"]
    assert judge_replay(
        "x", base, _side(_row("Net"), _row("Loss", _entry(), top="Loss"), loss)
    ).module_names == ["(loss)"]


def test_another_batch_explains_loss_and_gradients() -> None:
    """Its targets are others too; what a module does with equal inputs is named all the same."""
    rows = [_row("Net"), _row("a", _entry(same=1e-3)), _row("a.b")]
    other = {"error": 0.5, "moved": 0.0, "unit": UNIT}
    step = [_row(name, {"fwd": {"all": other}}, top="") for name in ("(batch)", "(loss)", "(gradients)")]
    found = judge_replay("x", BASE, _side(*rows, *step))
    assert [(one.module, one.answer) for one in found.findings] == [
        ("a", "another function"),
        ("(batch)", "another function"),
    ]
    assert found.modules == 3


def test_less_exact_modules_explain_loss_and_gradients_of_their_size() -> None:
    """16 bits in modules move the gradients of the step by as much; missing clipping moves them further."""
    rows = [_row("Net"), _row("a", _entry(error=3e-3)), _row("a.b")]
    for apart, answer, names in (
        (9e-3, "less exact", ["a"]),
        (0.5, "another function", ["a", "(gradients)"]),
    ):
        entry = {"error": apart, "moved": 0.0, "unit": UNIT}
        gradients = _row("(gradients)", {"wgrad": {"all": entry}}, top="")
        found = judge_replay("arm=native:bf16", BASE, _side(*rows, gradients))
        assert (found.answer, found.module_names) == (answer, names)
    # A tensor that the base has no digits of, as the gradient of a bias before batch norm, is no measure.
    base = _side(_row("Net"), _row("a", _entry(error=6.0)), _row("a.b"))
    found = judge_replay("x", base, _side(_row("Net"), _row("a", _entry(error=1e4)), _row("a.b"), gradients))
    assert "(gradients)" in found.module_names


def test_the_report_has_a_sentence_a_table_and_a_picture() -> None:
    found = judge_replay("tf32=on", BASE, _side(_row("Net"), _row("a"), _row("a.b", _entry(error=1e-3))))
    text = Terminal(100).document_text(replay_document([found]))
    assert text.startswith("tf32=on: less exact: a.b (Linear); judged were 3 modules\n")
    assert "a.b, forward (output 0)" in text
    assert [line.count("#") > 3 for line in text.splitlines() if line.startswith("a.b  ")] == [True]
