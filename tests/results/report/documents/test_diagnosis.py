"""A diagnosis on the terminal and as a page."""

import pytest

from ampcompare.results.records.diagnosis import (
    CandidateTrial,
    Cure,
    Diagnosis,
    Fault,
    LossScaleHeadroom,
    LostUpdates,
    MagnitudeRange,
    ModuleResultsAtStep,
    OperationPlace,
    PlaceReport,
)
from ampcompare.results.report.base import FORMATS
from ampcompare.results.report.documents.diagnosis import worst_places
from ampcompare.results.report.terminal import Terminal


def _report(module: str, error: float, **counts: int) -> PlaceReport:
    values = MagnitudeRange(elements=8, smallest=0.5, largest=3.0, exponents={-1: 4, 1: 4}, **counts)
    return PlaceReport(
        place=OperationPlace(module=module, operation="addmm", where="net.py:3"),
        range=values,
        error=error,
        made=0.0,
    )


@pytest.fixture
def diagnosis() -> Diagnosis:
    """Twelve places, the last of which overflows."""
    places = [_report(f"layer{number}", 0.001 * number) for number in range(11)]
    places.append(_report("head", float("inf"), nonfinite=1))
    return Diagnosis(
        arm="apex:O2",
        verdict="apex:O2: overflow at step 0: head addmm is the first",
        steps=2,
        observed=[0, 1],
        modules=["", *(one.place.module for one in places)],
        places=places,
        map=[ModuleResultsAtStep(module=one.place.module, step=0, range=one.range) for one in places],
        headroom=LossScaleHeadroom(
            exponents={-20: 3}, largest_scale=512.0, own_scale=128.0, lost={"1": 0.25}
        ),
        updates=[LostUpdates(parameter="head.weight", dtype="fp16", moved=4, lost=1)],
        faults=[
            Fault(
                kind="overflow",
                place=places[-1].place,
                step=0,
                text="head addmm is the first",
                chain=["a", "b"],
            )
        ],
        trials=[CandidateTrial(name="head", cures=True)],
        cure=Cure(keeps=["head"], arm="apex:O2,keep_fp32=head", code="model.head.float()"),
    )


def test_the_text_begins_with_the_verdict(diagnosis: Diagnosis) -> None:
    """The verdict is the first line; the cure, the fault and ten places follow, the one of the fault first."""
    lines = Terminal().render(diagnosis).splitlines()
    assert lines[0] == diagnosis.verdict
    text = "\n".join(lines)
    for part in (
        "model.head.float()",
        "keep_fp32=head",
        "chain: a > b",
        "25 % at 1",
        "head.weight (fp16)",
    ):
        assert part in text
    assert len(worst_places(diagnosis)) == 10
    assert worst_places(diagnosis)[0].place.module == "head"
    assert worst_places(diagnosis)[1].place.module == "layer10"


def test_the_page_draws_the_map(diagnosis: Diagnosis) -> None:
    """A row per module; nothing is loaded."""
    page = FORMATS["html"].make_reporter().render(diagnosis)
    for part in ("Map of modules and steps", "1 not finite"):
        assert part in page
    assert page.count("step 0: ") >= len(diagnosis.map)
    assert "https://" not in page
