"""The tables of explanations, against the engine and torch, and the search for the smallest change."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.apex.amp.frontend import Properties, opt_levels
from ampcompare.apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
from ampcompare.backends.apex_levels import LEVELS
from ampcompare.backends.arm import Arm
from ampcompare.diagnosis.remedies import TestedCandidate as Outcome
from ampcompare.diagnosis.remedies import diagnosis_with_tested_cure, search_for_cure
from ampcompare.results.records.diagnosis import Diagnosis, Fault, OperationPlace, PlaceReport


@pytest.mark.parametrize("name", LEVELS)
def test_levels_are_those_of_the_engine(name: str) -> None:
    """Each option of each level is what `amp.initialize` settles."""
    level = LEVELS[name]
    for option, value in opt_levels[name].options.items():
        ours: Any = getattr(level, option)
        if option == "cast_model_type" and ours is not None:
            ours = getattr(torch, ours)
        assert ours == value, option
    settled = Properties()
    opt_levels[name](settled)
    assert getattr(torch, level.half_dtype) is settled.half_dtype


def test_what_autocast_does_otherwise() -> None:
    """torch's own lists for CUDA, as its header has them, agree with the differences that are told."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.is_file():
        pytest.skip("this torch comes without its headers")
    text = header.read_text()
    lists = {
        name: set(re.findall(r"_\(\s*(\w+)", body))
        for name, body in re.findall(r"#define (AT_FORALL_\w+)\(_\)((?:.*\\\n)*.*\n)", text)
    }
    fp32 = lists["AT_FORALL_FP32"] | lists["AT_FORALL_FP32_SET_OPT_DTYPE"]
    everything = set.union(
        *(names for name, names in lists.items() if "LOWER_PRECISION" in name or "FP32" in name)
    )
    assert {"log1p", "logsumexp", "cdist", "softmax"} <= fp32
    assert not {"gelu", "std", "var"} & everything
    ours = {
        name
        for module in (functional_overrides, torch_overrides, tensor_overrides)
        for name in module.FP32_FUNCS
    }
    assert not {"log1p", "logsumexp", "cdist"} & ours
    assert {"gelu", "std", "var", "cpu"} <= ours


FAULT = Fault(
    kind="overflow",
    place=OperationPlace(module="", operation="log", where="loss.py:4", phase="forward"),
    step=0,
    text="log",
    near=[("", "loss.py:2"), ("", "loss.py:3")],
)


@pytest.mark.parametrize(
    ("needed", "trials"),
    [
        ({"loss.py:4"}, 1),
        ({"loss.py:3"}, 3),
        ({"loss.py:4", "loss.py:2"}, 4),  # each alone changes nothing
        ({"loss.py:2", "loss.py:3"}, 6),  # and the third is dropped again
    ],
)
def test_lines_that_help_only_together_are_found(needed: set[str], trials: int) -> None:
    """The change that is found holds the lines that remove the fault and no other."""

    def run(arm: Arm, lines: Sequence[str]) -> Outcome:
        return Outcome([] if needed <= set(lines) else [FAULT])

    found = search_for_cure(Arm.parse("apex:O2"), [FAULT], None, run, [])
    assert set(found.change.lines) == needed
    assert len(found.trials) >= trials


def test_lines_of_a_function_that_are_wrong_alike_are_tried_together(tmp_path: Path) -> None:
    """As three variances of an SSIM; lines of another function, or of one inside of it, are not."""
    inner_function = "    def inner(x):\n        return x\n"
    source = f"def ssim(x):\n    a = x\n{inner_function}    b = x\n    c = x\n    return a\ny = ssim(1)\n"
    (tmp_path / "loss.py").write_text(source)
    lines = [f"loss.py:{number}" for number in (2, 4, 5, 6, 7, 8)]
    reports = [PlaceReport(place=OperationPlace(operation="sub", where=line)) for line in lines]
    fault = FAULT.model_copy(
        update={"place": FAULT.place.model_copy(update={"where": "loss.py:6"}), "near": []}
    )
    needed = {"loss.py:2", "loss.py:5", "loss.py:6", "loss.py:7", "loss.py:4"}

    def run(arm: Arm, kept: Sequence[str]) -> Outcome:
        return Outcome([] if needed <= set(kept) else [fault])

    found = diagnosis_with_tested_cure(
        Diagnosis(arm="apex:O2", verdict="", steps=1, faults=[fault], places=reports),
        Arm.parse("apex:O2"),
        run,
        folder=str(tmp_path),
    )
    assert found.cure is not None
    assert set(found.cure.keeps) == needed
    inner = fault.model_copy(update={"place": fault.place.model_copy(update={"where": "loss.py:4"})})
    alone = diagnosis_with_tested_cure(
        found.model_copy(update={"faults": [inner]}),
        Arm.parse("apex:O2"),
        lambda arm, kept: Outcome([inner]),
        folder=str(tmp_path),
    )
    assert [trial.name for trial in alone.trials] == ["loss.py:4"]


def test_no_change_is_found_where_none_helps() -> None:
    """The search ends, within the runs that are allowed."""
    found = search_for_cure(
        Arm.parse("apex:O2"), [FAULT], None, lambda arm, lines: Outcome([FAULT]), [], max_trials=4
    )
    assert found.change is None
    assert len(found.trials) == 4
