"""Rules of reasons, each from a profile that was written down."""

from typing import Any

import pytest

from ampcompare.diagnosis.profiling.reasons import (
    headline_of_profiles,
    profiles_with_reasons,
    reasons_of_profile,
)
from ampcompare.results.records.profile import (
    ArmProfile,
    DeviceUtilization,
    HeldMemory,
    HostRead,
    MemoryAtPeak,
    RepeatedCast,
    StepPart,
    TimedChange,
    UnalignedProduct,
)


def _arm(arm: str = "native:bf16", **parts: float) -> ArmProfile:
    """Return a profile of one second: `forward_product=0.5` and so on; products of the forward pass fill it up."""
    given = [
        StepPart(phase=phase, kind=kind, seconds=seconds)  # type: ignore[arg-type]
        for (phase, kind), seconds in ((name.split("_"), seconds) for name, seconds in parts.items())
    ]
    left = 1.0 - sum(part.seconds for part in given)
    half = "bf16" if "bf16" in arm else ""
    return ArmProfile(
        arm=arm,
        seconds=1.0,
        half_dtype=half,
        optimizer="Adam (for-loop)",
        parts=[*given, StepPart(phase="forward", kind="product", seconds=left)],
        limits=DeviceUtilization(flops=1e9, bytes=1e6),
        memory=MemoryAtPeak(
            measured_bytes=1000, held=[HeldMemory(kind="weights", dtype="fp32", bytes=1000)], rest_bytes=0
        ),
    )


def _tried(change: str, seconds: float) -> list[TimedChange]:
    return [TimedChange(change=change, before_seconds=1, seconds=seconds)]


HEAD = UnalignedProduct(module="head", operation="addmm", dtype="bf16", sizes=["out 30"], share=0.4)
KEPT = [HeldMemory(kind="mid", dtype="bf16", bytes=200)]
TWICE = MemoryAtPeak(measured_bytes=1000, held=[], rest_bytes=0, kept_twice_bytes=200, kept_twice=KEPT)
FP32 = {"arm": "fp32", "half_dtype": ""}


def _read(calls: float, steps: int, seconds: float = 0.0, where: str = "a.py:3") -> HostRead:
    return HostRead(where=where, what="item", calls=calls, seconds=seconds, steps=steps, watched=5)


FUSED = {"trials": _tried("--optimizer-implementation fused", 0.88)}
AGAIN = RepeatedCast(where="a.py:7", module="", casts=24, bytes=500_000)
SMALL = {"trials": _tried("--batch-size 8", 0.4), "batch_size": 2}
CASES: list[tuple[str, dict[str, float], dict[str, Any], str]] = [
    ("data", {"data_host": 0.3}, {}, "30 % of the step waits for the next batch"),
    ("data", {"data_host": 0.2, "data_emulation": 0.4}, FP32, "33 % of the step waits for the next batch"),
    ("host", {"forward_host": 0.4}, {}, "40 % of the step the host runs code outside of any operation"),
    ("host", {"forward_host": 0.4}, {"device": "NVIDIA A100"}, "the device waits for the host"),
    ("small batch", {}, SMALL, "with --batch-size 8 a sample takes 60 % less time"),
    ("synchronization", {}, {"syncs": [_read(9, 2, 0.2)]}, "9 times in 2 of 5 steps, at a.py:3"),
    (
        "synchronization",
        {},
        {"syncs": [_read(1, 5)]},
        "the host reads 1 value of tensors in each step, at a.py:3",
    ),
    (
        "synchronization",
        {},
        {"syncs": [_read(8, 1, 0, "b.py:1"), _read(1, 5)]},
        "1 value of tensors in each step",
    ),
    (
        "synchronization",
        {},
        {"syncs": [HostRead(where="a.py:3", what="item", calls=1)]},
        "in the step that was watched",
    ),
    ("dimensions", {}, {"products": [HEAD]}, "head (out 30)"),
    ("fp32 operations", {}, {"fp32_seconds": 0.5}, "50 % of the step computes in fp32"),
    ("casts", {"forward_cast": 0.2}, {}, "casts take 20 % of the step"),
    ("casts", {}, {"repeated": [AGAIN]}, "casts the same tensor again, 24 times at a.py:7"),
    ("optimizer", {"optimizer_pointwise": 0.3}, {}, "Adam (for-loop) takes 30 % of the step"),
    ("optimizer", {"optimizer_pointwise": 0.15}, FUSED, "takes 15 %"),
    ("kept twice", {}, {"memory": TWICE}, "20 % of the peak of memory, are kept in two types: mid"),
    (
        "graph breaks",
        {},
        {"graph_breaks": {"item": 2}},
        "breaks the graph 2 times (0 in the reference): item",
    ),
    ("emulation", {}, {"half": "bf16 emulated"}, "products of bf16 are computed in fp32 and rounded"),
]


@pytest.mark.parametrize(("kind", "parts", "facts", "words"), CASES)
def test_a_cause_is_named_alone(
    kind: str, parts: dict[str, float], facts: dict[str, Any], words: str
) -> None:
    (reason,) = reasons_of_profile(_arm(**parts).model_copy(update=facts), _arm("fp32"))
    assert reason.kind == kind
    assert words in reason.text


def test_a_change_that_saves_nothing_is_no_reason() -> None:
    """A trial that was slower, or failed, gives none, and neither does an optimizer whose cures did not help."""
    trials = [
        TimedChange(change="--batch-size 8", before_seconds=1, seconds=0, failure="no such batch"),
        TimedChange(change="--optimizer-implementation fused", before_seconds=1, seconds=0.99),
    ]
    arm = _arm(optimizer_pointwise=0.3).model_copy(update={"trials": trials})
    assert reasons_of_profile(arm, _arm("fp32")) == []


def test_the_headline_says_why() -> None:
    """An arm that is not faster has its first reason in its sentence."""
    slow = _arm(forward_host=0.61)
    fast = _arm("half:bf16").model_copy(update={"seconds": 0.5})
    sentences = headline_of_profiles(profiles_with_reasons([_arm("fp32"), slow, fast]))
    assert sentences[1].startswith(
        "native:bf16 is not faster than fp32 (1.00x the step time, memory 1.00x): in 61 % of"
    )
    assert sentences[2] == "half:bf16 takes 0.50x the step time of fp32; memory 1.00x"


def test_the_headline_gives_no_share_of_time_as_the_reason_of_a_size() -> None:
    """Nor any of a time that it calls no measure."""
    emulated = _arm(optimizer_pointwise=0.6).model_copy(update={"half": "bf16 emulated"})
    found = profiles_with_reasons([_arm("fp32"), emulated])
    assert found[1].reasons[0].kind == "optimizer"
    _, sentence = headline_of_profiles(found)
    assert sentence.endswith("so its time is no measure; memory 1.00x")
