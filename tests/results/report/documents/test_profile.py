"""A profile on the terminal, as Markdown and as a page."""

import pytest

from ampcompare.results.records.profile import (
    ArmProfile,
    DeviceUtilization,
    HeldMemory,
    MemoryAtPeak,
    ModuleTime,
    Operation,
    Profile,
    ReasonForLittleGain,
    StepPart,
    TimedChange,
)
from ampcompare.results.report.base import FORMATS
from ampcompare.results.report.documents.profile import profile_document
from ampcompare.results.report.terminal import Terminal


def _arm(name: str, seconds: float, dtype: str) -> ArmProfile:
    return ArmProfile(
        arm=name,
        seconds=seconds,
        parts=[
            StepPart(phase="forward", kind="product", seconds=0.6 * seconds),
            StepPart(phase="backward", kind="cast", seconds=0.4 * seconds),
        ],
        operations=[
            Operation(name="aten::addmm", phase="forward", kind="product", dtype=dtype, seconds=0.001)
        ],
        layers=[ModuleTime(module="head", seconds=0.001)],
        memory=MemoryAtPeak(
            measured_bytes=3 * 2**20,
            held=[HeldMemory(kind="weights", dtype=dtype, bytes=2 * 2**20)],
            rest_bytes=2**20,
            layers=[HeldMemory(kind="head", dtype=dtype, bytes=2**20)],
        ),
        limits=DeviceUtilization(
            flops=2e9, bytes=1e8, peak_flops=1e12, peak_bytes=1e11, peak_dtype=dtype, source="a data sheet"
        ),
        trials=[TimedChange(change="--channels-last", before_seconds=1, seconds=0.75)],
    )


@pytest.fixture
def profile() -> Profile:
    """Two arms, and one that failed."""
    reason = ReasonForLittleGain(
        kind="casts", text="casts take 40 % of the step", share=0.4, gain="cast once", evidence=["at a.py:3"]
    )
    slow = _arm("native:bf16", 0.02, "bf16").model_copy(
        update={"reasons": [reason], "rank_seconds": [0.02, 0.0305]}
    )
    return Profile(
        reference="fp32", headline=["fp32 takes 10.00 ms a step",
         "native:bf16 is not faster than fp32 (0.50x): casts take 40 % of the step"],
        arms=[_arm("fp32", 0.01, "fp32"), slow, ArmProfile(arm="fp8", failure="no such device")],
    )  # fmt: skip


PARTS = (
    "native:bf16 is not faster than fp32 (0.50x)",
    "casts: casts take 40 % of the step; gain: cast once",
    "12.00 (60 %)",
    "20.0 %",  # MFU of fp32: 2e9 / 0.01 / 1e12
    "+25 %",
    "30.50",
    "weights, bf16",
)


def test_the_text_begins_with_the_sentences(profile: Profile) -> None:
    """Sentences, reasons with their evidence, and a column for each arm that has a profile, in Markdown too."""
    text = Terminal(200).render(profile)
    markdown = FORMATS["md"].make_reporter().render(profile)
    assert text.startswith(profile.headline[0])
    assert "# Profile" in markdown
    for part in (*PARTS, "at a.py:3", "33 % of the peak of memory is workspace"):
        assert part in " ".join(text.split()), part
        assert part in " ".join(markdown.split()), part
    assert "fp8" not in text.split("One step, ms")[1].split("\n\n")[0]


def test_the_page_draws_bars(profile: Profile) -> None:
    """A part is a rectangle with its text; nothing is loaded."""
    page = FORMATS["html"].make_reporter().render(profile)
    assert "native:bf16, casts: 8.000 ms, 40 %" in page
    assert "Peak of memory" in page
    assert "https://" not in page
    assert "<span>native:bf16</span>" in page, "beside the bar, which any width stretches"


def test_a_profile_without_counts_has_a_page(profile: Profile) -> None:
    """A compiled model has neither memory nor FLOPs, and a name with a tag stays text."""
    bare = ArmProfile(arm="<b>", seconds=0.1, parts=[StepPart(phase="forward", kind="host", seconds=0.1)])
    shown = profile.model_copy(update={"arms": [bare], "headline": ["<b> takes 100 ms a step"]})
    page = FORMATS["html"].make_reporter().render(shown)
    assert "<b> takes" not in page


def test_the_page_begins_with_the_answer(profile: Profile) -> None:
    """What the reference takes comes behind it; a step alone is the answer where there is no other arm."""
    assert profile_document(profile).title == profile.headline[1]
    page = FORMATS["html"].make_reporter().render(profile)
    assert page.index("<h1>") < page.index("of the peak of memory is workspace")
    alone = profile.model_copy(update={"headline": profile.headline[:1], "arms": profile.arms[:1]})
    assert profile_document(alone).title == profile.headline[0]
