"""An arm that did not run as it declares has no verdict; old records, which have no ledger, are judged as before."""

from typing import Any

import pytest

from ampcompare.backends.arm import Arm
from ampcompare.results.analysis.pairing.declared import (
    ineffective_option_sentences,
    observed_types_text,
    role_comparisons,
    sentences_on_types_not_of_arm,
)
from ampcompare.results.analysis.summary import summarize
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.ledger import GroupTypes, Ledger
from ampcompare.results.records.run import ScriptFacts
from ampcompare.results.report.document import Figure, Table
from ampcompare.results.report.documents.ledger import ledger_blocks
from ampcompare.results.report.documents.overview import row_notes
from ampcompare.results.report.markdown import Markdown
from ampcompare.results.report.terminal import Terminal
from ampcompare.testing import make_comparison, make_record

WITH_MASTERS = GroupTypes(name="SGD 0", weights={"bf16": 1.0}, masters={"fp32": 1.0}, gradients={"fp32": 1.0})
WHY = "not as declared (state is fp32, bf16 was asked)"


def ledger(products: str = "bf16", state: str = "fp32", weights: str = "fp32", **facts: Any) -> Ledger:
    """Return what a training shows whose products are the only 16-bit part, changed as asked."""
    group = GroupTypes(
        name="SGD 0", parameters=10, weights={weights: 1.0}, gradients={weights: 1.0}, state={state: 1.0}
    )
    return Ledger(steps=[0, 1], groups=[group], forward={products: 1.0}, backward={products: 1.0}, **facts)


def compared(seen: dict[str, Ledger | None], reference: str = "fp32") -> Comparison:
    records = [
        make_record(arm, seed, top1=0.8 + 0.01 * seed).model_copy(update={"ledger": its})
        for arm, its in seen.items()
        for seed in range(3)
    ]
    return summarize(records, arms=list(seen), reference=reference)


def test_no_verdict_on_an_arm_that_ran_as_another() -> None:
    """Each of its verdicts says what ran, and so do the headline and the table, in which it stands first."""
    comparison = compared({"fp32": ledger("fp32"), "native:bf16,state=bf16": ledger()})
    row = comparison.arms[1]
    assert {str(row.quality), str(row.time), str(row.loss)} == {WHY}
    assert f"No verdict on native:bf16,state=bf16: it is {WHY}." in comparison.headline
    assert row.valid_time_ratio is None
    table, figure = ledger_blocks(comparison)
    assert isinstance(table, Table)
    assert isinstance(figure, Figure)
    assert table.texts[0][0] == "native:bf16,state=bf16"
    assert "fp32 (bf16)" in table.texts[0]
    drawn = [
        (bar["name"], [text for *_, text in bar["segments"]], bar["text"]) for bar in figure.data["bars"]
    ]
    assert drawn[0] == ("native:bf16,state=bf16", [], "declared")
    assert ("state", ["fp32: 100%"], "not bf16") in drawn[:5]
    assert ("forward products", ["bf16: 100%"], "bf16") in drawn[:5]
    assert figure.data["key"] == [("bf16", 0), ("fp32", 1)]
    assert "## Declared and observed" in Markdown().render(comparison)
    assert "not as declared" in Terminal(100).render(comparison)


def test_one_seed_that_ran_otherwise_is_enough() -> None:
    comparison = compared({"fp32": ledger("fp32"), "native:bf16,state=bf16": ledger(state="bf16")})
    assert "not as declared" not in str(comparison.arms[1].quality)
    records = [*comparison.records[:-1], comparison.records[-1].model_copy(update={"ledger": ledger()})]
    again = make_comparison(records, arms=["fp32", "native:bf16,state=bf16"])
    assert str(again.arms[1].quality) == WHY


def test_nothing_is_compared_with_a_reference_that_ran_as_another() -> None:
    comparison = compared(
        {"native:bf16,state=bf16": ledger(), "fp32": ledger("fp32")}, "native:bf16,state=bf16"
    )
    assert comparison.headline[0] == f"Nothing to compare: native:bf16,state=bf16 is {WHY}."
    assert "the reference, is not as declared" in str(comparison.arms[1].quality)


@pytest.mark.parametrize(
    ("arm", "seen", "differing"),
    [
        ("fp32", ledger("fp32"), []),
        ("fp32", ledger("tf32"), []),  # torch's own setting of a GPU
        ("fp32", ledger("fp64", "fp64", "fp64"), []),  # the model's own
        ("fp32", ledger("bf16"), ["forward products", "backward products"]),
        ("fp32", ledger("bf16", frozen={"bf16": 1.0}), []),  # adapters over a base in 16 bits
        ("fp32", ledger("fp16", frozen={"bf16": 1.0}), ["forward products", "backward products"]),
        ("native:bf16", ledger(state="uint8"), []),  # an optimizer with a state of 8 bits
        ("native:fp16", ledger("fp16"), ["loss scale"]),
        ("native:fp16", ledger("fp16", loss_scale=1024.0), []),
        ("native:fp16", ledger("fp16", loss_scale=1.0), []),
        ("apex:O4", ledger("bf16", loss_scale=1.0), []),
        ("apex:O5", ledger("bf16", "bf16", "bf16"), ["masters", "gradients"]),
        ("half:bf16", ledger("bf16", "fp32", "bf16"), []),  # the optimizer keeps it so by itself
        ("native:bf16", ledger(state="bf16"), []),
        ("native:bf16,state=bf16", ledger(), ["state"]),
        ("half:bf16", ledger("bf16", "bf16", "bf16", reduced={"fp32": 1.0}), ["reduction"]),
        ("half:bf16,keep_fp32=*", ledger("fp32"), []),
        ("fp8:tensorwise", ledger("bf16"), ["forward products", "backward products"]),
        ("fp8:tensorwise", ledger("fp32", emulated="fp8"), []),
        ("half:bf16,kahan", ledger("bf16", "bf16", "bf16", update="nearest"), ["rounding", "gradients"]),
        ("half:bf16", Ledger(), []),  # nothing was seen
    ],
)
def test_which_parts_differ(arm: str, seen: Ledger, differing: list[str]) -> None:
    """What a model, an optimizer or a device sets by itself is no difference; what the arm sets is."""
    found = role_comparisons(Arm.parse(arm).roles, seen)
    assert sorted(role.name for role in found if role.differs) == sorted(differing)
    assert [role.differs for role in found] == sorted((role.differs for role in found), reverse=True)


@pytest.mark.parametrize(
    ("arm", "seen", "texts"),
    [
        (
            "native:bf16,state=bf16",
            Ledger(groups=[GroupTypes(name="SGD 0", weights={"fp32": 1.0})], forward={"bf16": 1.0}),
            ["state=bf16 has no effect on this training: the optimizer keeps none"],
        ),
        ("native:bf16,state=bf16", ledger(state="bf16"), []),
        (
            "half:bf16,masters=fp32,keep_fp32=*",
            ledger("fp32"),
            ["masters=fp32 has no effect on this training: every weight is fp32"],
        ),
        (
            "half:bf16,masters=fp32,grads=fp32",
            Ledger(groups=[WITH_MASTERS], forward={"bf16": 1.0}),
            ["grads=fp32 has no effect on this training: one backward pass a step"],
        ),
        (
            "half:bf16,masters=fp32,grads=fp32",
            Ledger(groups=[WITH_MASTERS], forward={"bf16": 1.0}, accumulated={"fp32": 1.0}),
            [],
        ),
        (
            "native:bf16,reduce=fp16",
            ledger(),
            ["reduce=fp16 has no effect on this training: one process, or no reduction was seen"],
        ),
        ("native:bf16,reduce=fp16", ledger(reduced={"fp16": 1.0}), []),
        ("native:bf16,state=bf16", Ledger(steps=[0], skipped=1, groups=[GroupTypes(name="SGD 0")]), []),
        # not as declared: gradients of a step are fp32
        ("half:bf16,state=bf16", ledger("bf16", "bf16", "bf16"), []),
        ("native:bf16,state=bf16", Ledger(), []),  # nothing was seen
        ("fp32", ledger("fp32"), []),
        ("script", ledger("fp32"), []),
    ],
)
def test_which_options_have_no_effect(arm: str, seen: Ledger, texts: list[str]) -> None:
    assert ineffective_option_sentences(Arm.parse(arm), seen) == texts


@pytest.mark.parametrize(
    ("arm", "seen", "notes"),
    [
        ("half:bf16", ledger("bf16", "fp32", "bf16"), ["the optimizer keeps its state in fp32"]),
        (
            "fp32",
            Ledger(forward={"bf16": 0.96, "fp32": 0.04}, backward={"fp32": 1.0}, frozen={"bf16": 1.0}),
            ["96 % of forward products in bf16: frozen weights"],
        ),
        ("native:bf16", ledger(frozen={"bf16": 1.0}), []),
        ("fp32", ledger("bf16"), []),  # that is not as declared
        ("fp8:tensorwise", Ledger(forward={"fp8": 0.9, "bf16": 0.1}), []),
        (
            "script",
            Ledger(forward={"bf16": 1.0}, unseen="torch.compile"),
            ["products not seen: torch.compile"],
        ),
    ],
)
def test_what_an_arm_leaves_to_the_training_is_named(arm: str, seen: Ledger, notes: list[str]) -> None:
    assert sentences_on_types_not_of_arm(Arm.parse(arm).roles, seen) == notes


def test_frozen_16_bit_weights_stand_in_the_row_and_in_parentheses() -> None:
    """The run has its verdict all the same."""
    seen = Ledger(
        groups=[GroupTypes(name="SGD 0", parameters=1, weights={"fp32": 1.0})],
        forward={"bf16": 0.96, "fp32": 0.04},
        frozen={"bf16": 1.0},
    )
    comparison = compared({"script": seen, "fp32": seen}, "script")
    assert "not as declared" not in str(comparison.arms[1].quality)
    assert row_notes(comparison)[1][-1] == "96 % of forward products in bf16: frozen weights"
    table = ledger_blocks(comparison)[0]
    assert isinstance(table, Table)
    assert any("bf16 96 %, fp32 4 % (fp32)" in texts for texts in table.texts)


def test_a_comparison_names_options_without_effect() -> None:
    seen = Ledger(groups=[GroupTypes(name="SGD 0", weights={"fp32": 1.0})], forward={"bf16": 1.0})
    reading = compared({"fp32": None, "native:bf16,state=bf16": seen}).reading
    line = "native:bf16,state=bf16: state=bf16 has no effect on this training: the optimizer keeps none."
    assert reading.count(line) == 1


@pytest.mark.parametrize(
    ("types", "largest", "scale", "text", "remark"),
    [
        ("fp16", 3.0, None, "3", ""),
        ("fp16", 64.0, 1024.0, "6.55e+04", "beyond 65504, the largest number of fp16"),
        ("fp16", 63.0, 1024.0, "6.45e+04", ""),
        ("bf16", 1e9, None, "", ""),
        ("fp16", None, None, "", ""),
    ],
)
def test_a_gradient_times_the_scale_is_compared_with_fp16(
    types: str, largest: float | None, scale: float | None, text: str, remark: str
) -> None:
    """Only where fp16 holds it."""
    seen = ledger(types, types, types, largest_gradient=largest, loss_scale=scale, zero_denominators=0.03)
    found = {role.name: role for role in role_comparisons(None, seen)}
    assert "largest gradient" in found or not text
    if text:
        assert (found["largest gradient"].observed, found["largest gradient"].remark) == (text, remark)
    assert found["zero denominators"].observed == "3 %"


@pytest.mark.parametrize(
    ("types", "text"),
    [({}, ""), ({"bf16": 1.0}, "bf16"), ({"fp32": 0.02, "bf16": 0.98}, "bf16 98 %, fp32 2 %"),
     ({"bf16": 0.9999, "fp32": 0.0001}, "bf16 >99 %, fp32 <1 %")],
)  # fmt: skip
def test_shares_in_words(types: dict[str, float], text: str) -> None:
    assert observed_types_text(types) == text


@pytest.mark.parametrize(
    ("forward", "backward", "by", "remarks"),
    [
        ("fp32", "fp32", "autocast, train.py:3", ["autocast, train.py:3, which has cast none", ""]),
        ("bf16", "bf16", "autocast, train.py:3", ["autocast, train.py:3", ""]),
        ("bf16", "fp16", "autocast, train.py:3", ["autocast, train.py:3", "fp16 in the backward pass alone"]),
        ("fp32", "fp32", "", ["", ""]),
    ],
)
def test_products_that_are_not_those_of_autocast_are_named(
    forward: str, backward: str, by: str, remarks: list[str]
) -> None:
    """Another thread computes without the autocast of the first, and a function may compute again in another type."""
    seen = ledger(forward, by={"products": by} if by else {}).model_copy(update={"backward": {backward: 1.0}})
    found = {one.name: one.remark for one in role_comparisons(None, seen)}
    assert [found["forward products"], found["backward products"].partition(",")[0]] == remarks


def test_what_16_bits_take_from_a_script_stands_in_the_table() -> None:
    """Once for each arm, though each of its seeds has it."""
    text = "a sum in bf16 stands still (train.py:7)"
    records = [
        make_record(arm, seed, top1=0.8).model_copy(
            update={"script": ScriptFacts(remarks=[text] * (arm == "script"))}
        )
        for arm in ("script", "native:bf16")
        for seed in range(3)
    ]
    comparison = summarize(records, arms=["script", "native:bf16"], reference="script")
    assert [text in notes for notes in row_notes(comparison)] == [True, False]
    assert [notes.count(text) for notes in row_notes(comparison)] == [1, 0]
    assert "a sum in bf16 stands still" in Terminal(200).render(comparison)
    assert f"script: {text}." in comparison.reading
