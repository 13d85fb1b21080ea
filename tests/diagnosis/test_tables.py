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
from ampcompare.diagnosis.remedies import search_for_cure
from ampcompare.results.records.diagnosis import Fault, OperationPlace


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


def test_no_change_is_found_where_none_helps() -> None:
    """The search ends, within the runs that are allowed."""
    found = search_for_cure(
        Arm.parse("apex:O2"), [FAULT], None, lambda arm, lines: Outcome([FAULT]), [], max_trials=4
    )
    assert found.change is None
    assert len(found.trials) == 4
