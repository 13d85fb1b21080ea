"""Arms of other libraries against our own arm of the precision that they really ran in."""

import pytest

from ampcompare.results.records.comparison import ArmSummary, Comparison, Twin
from ampcompare.results.records.ledger import Ledger
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.columns import columns
from ampcompare.results.report.json import Json
from ampcompare.testing import make_comparison, make_record

ACCELERATE = {"accelerate": "1.15.0"}
IN_FP32 = Ledger(forward={"fp32": 1.0})
FP32, OURS = [0.90, 0.92, 0.91, 0.93, 0.92], [0.80, 0.83, 0.81, 0.82, 0.80]


def _runs(arm: str, top1: list[float], losses: str, **facts: object) -> list[RunRecord]:
    return [
        make_record(arm, seed, top1=share, losses=f"{losses} {seed}", weights_sha256=f"{losses} {seed}").model_copy(
            update=facts
        )
        for seed, share in enumerate(top1)
    ]


def _comparison(*arms: str) -> Comparison:
    """The matrix of the arms named, of those that are made here."""
    made = {
        "fp32": _runs("fp32", FP32, "a"),
        "native:bf16": _runs("native:bf16", OURS, "b"),
        "native:fp16": _runs("native:fp16", FP32, "d"),
        "accelerate:bf16": _runs("accelerate:bf16", OURS, "b", packages=ACCELERATE),
        "accelerate:fp16": _runs("accelerate:fp16", FP32, "c", packages=ACCELERATE, ledger=IN_FP32),
    }
    return make_comparison([record for arm in arms for record in made[arm]], arms=arms)


def _twin(comparison: Comparison, arm: str) -> Twin:
    return next(twin for twin in comparison.twins if twin.arm == arm)


def _row(comparison: Comparison, arm: str) -> ArmSummary:
    return next(row for row in comparison.arms if row.arm == arm)


def test_the_verdict_is_against_the_arm_of_the_same_precision() -> None:
    """An arm that is worse than the reference is identical to its twin, bit for bit, and both are said."""
    comparison = _comparison("fp32", "native:bf16", "accelerate:bf16")
    assert str(_row(comparison, "accelerate:bf16").quality) == "worse"
    twin = _twin(comparison, "accelerate:bf16")
    assert (twin.twin, twin.library, twin.pairs) == ("native:bf16", "accelerate 1.15.0", 5)
    assert (str(twin.quality), twin.same_bits, twin.quality.effect) == ("identical", True, 0)
    assert (
        "accelerate:bf16 (accelerate 1.15.0) against native:bf16, the precision that it ran in: identical, "
        "every loss the same to the last bit, 5 seeds." in comparison.reading
    )


def test_a_precision_that_was_not_asked_for_has_no_verdict_and_no_twin() -> None:
    """The row names the library with its version, and what its ledger shows in the place of a verdict."""
    comparison = _comparison("fp32", "native:fp16", "accelerate:fp16")
    row = _row(comparison, "accelerate:fp16")
    assert columns(comparison)["engine"].cell(row, comparison).text == "accelerate 1.15.0"
    assert str(row.quality).startswith("not as declared (products are fp32, fp16 was asked")
    assert comparison.twins == []


def test_a_record_that_named_its_library_apart_is_read() -> None:
    ran = {"arm": "fp32", "library": "accelerate", "version": "1.15.0", "as_asked": False, "reason": "no fp16 here"}
    data = {**make_record("accelerate:fp16", 0).model_dump(by_alias=True), "effective": ran}
    record = RunRecord.model_validate(data)
    assert (record.library, record.notes) == ("accelerate 1.15.0", ["no fp16 here"])


def test_a_twin_that_did_not_run_is_asked_for() -> None:
    """Without the twin in the matrix there is no verdict, and the line says what to add."""
    comparison = _comparison("fp32", "accelerate:bf16")
    twin = _twin(comparison, "accelerate:bf16")
    assert (twin.pairs, str(twin.quality)) == (0, "")
    assert comparison.reading[-1].endswith("the precision that it ran in: not known, add --arm native:bf16.")


def test_what_is_varied_is_part_of_the_twin() -> None:
    """In a matrix over a setting the twin is the row with the same value."""
    records = []
    for size in (32, 64):
        for arm in ("native:bf16", "accelerate:bf16"):
            for record in _runs(arm, OURS, "b"):
                records.append(record.model_copy(update={"arm": f"{arm} batch_size={size}"}))
    arms = list(dict.fromkeys(record.arm for record in records))
    comparison = make_comparison(records, arms=arms)
    found = {twin.arm: twin.twin for twin in comparison.twins}
    assert found == {f"accelerate:bf16 batch_size={size}": f"native:bf16 batch_size={size}" for size in (32, 64)}


@pytest.mark.parametrize("arms", [("fp32", "native:bf16"), ("fp32",)])
def test_our_own_arms_have_none(arms: tuple[str, ...]) -> None:
    """Nothing is said of twins where no other library ran, and old reports without them are read."""
    comparison = _comparison(*arms)
    assert comparison.twins == []
    assert "precision that it ran in" not in "\n".join(comparison.reading)
    assert '"twins": []' in Json().render(comparison)
    data = comparison.model_dump(by_alias=True)
    del data["twins"]
    assert Comparison.model_validate(data).twins == []
