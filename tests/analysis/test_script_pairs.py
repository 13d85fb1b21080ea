"""Runs of a script are pairs only if they began alike."""

from __future__ import annotations

from typing import Any

from ampcompare.analysis.script_pairs import began_apart, script_sentences
from ampcompare.records.run import RunRecord, ScriptFacts
from ampcompare.settings.config import RunConfig


def record(
    arm: str, weights: str = "w", batches: tuple[str, ...] = ("b",), files: tuple[str, ...] = (), **more: Any
) -> Any:
    config = RunConfig(arm=arm)
    facts = ScriptFacts(weights=[weights], batches=list(batches), files=list(files), **more)
    return RunRecord(cell=config.digest(), arm=arm, status="completed", config=config, script=facts)


def test_other_weights_or_batches_part_a_pair() -> None:
    """Batches count as far as both have seen them."""
    assert began_apart(record("fp32"), record("half", weights="v")) == "began from other weights"
    assert began_apart(record("fp32"), record("half", batches=("c",))) == "saw other first batches"
    assert began_apart(record("fp32"), record("half", batches=("b", "c"))) == ""


def test_the_report_says_whether_runs_are_paired() -> None:
    """One sentence where all are, one for each reason where not, and one for a file that several wrote."""
    alike = [record("fp32"), record("half")]
    assert [text.partition(":")[0] for text in script_sentences(alike, "fp32")] == ["Paired"]
    apart = [record("fp32", files=("/out",)), record("half", weights="v", files=("/out",))]
    first, second = script_sentences(apart, "fp32")
    assert first.startswith("Not paired: half, seed 0 began from other weights than fp32")
    assert second.startswith("2 cells wrote /out, fp32, seed 0, first")


def test_departures_are_named() -> None:
    """Once for all arms that have them."""
    alike = [record("fp32"), record("half", notes=["one scale"]), record("native:fp16", notes=["one scale"])]
    assert list(script_sentences(alike, "fp32"))[1:] == ["half, native:fp16: one scale."]
