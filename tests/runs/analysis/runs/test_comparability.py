"""Which settings two runs may differ in, and how a difference is told."""

from __future__ import annotations

from typing import Any

import pytest

from ampcompare.runs.analysis.runs.comparability import (
    accuracy_incomparable_reason,
    changed_settings,
    incomparable_times,
)
from ampcompare.runs.records.run import RunRecord, ScriptFacts
from ampcompare.runs.records.verdict import Verdict
from ampcompare.runs.settings.config import RunConfig
from ampcompare.testing import make_record


def _with(record: RunRecord, **values: Any) -> RunRecord:
    config = RunConfig.model_validate({**record.config.model_dump(), **values})
    return record.model_copy(update={"config": config})


def test_arm_and_seed_are_what_is_compared() -> None:
    """Two arms and two seeds of one recipe differ in nothing."""
    assert changed_settings(make_record("fp32", 0).config, make_record("half", 3).config) == []


def test_a_recipe_must_be_equal() -> None:
    """A setting of the recipe makes accuracy and time incomparable, and is named with both values."""
    record = make_record()
    other = _with(record, recipe={**record.config.recipe.model_dump(), "batch_size": 32})
    assert accuracy_incomparable_reason(record, other) == "global batch size 64, not 32"
    assert incomparable_times(record, other).why == "global batch size 64, not 32"


def test_many_differences_are_cut_short() -> None:
    record = make_record()
    recipe = {**record.config.recipe.model_dump(), "epochs": 9, "batch_size": 32, "clip_grad": 1.0, "max_steps": 3}
    assert accuracy_incomparable_reason(_with(record, recipe=recipe), record).endswith("; ...")


@pytest.mark.parametrize("launch", [{"workers": 2}, {"threads": 2}, {"drain_every": 5}])
def test_how_a_run_is_launched_may_differ_where_it_is_named(launch: dict[str, int]) -> None:
    """Threads and the like change no accuracy; their effect on time is a fair question where the row names them."""
    record = make_record()
    ((name, value),) = launch.items()
    other = _with(record, **launch)
    named = other.model_copy(update={"arm": f"fp32 {name}={value}"})
    assert accuracy_incomparable_reason(record, other) == accuracy_incomparable_reason(record, named) == ""
    assert incomparable_times(other, record).why.startswith(f"{name} {value}, not ")
    assert incomparable_times(record, named) == incomparable_times(named, record) == Verdict()


def test_times_need_one_machine_to_themselves() -> None:
    """Cells that ran at once, or on other hardware, keep their accuracy and lose their times."""
    record = make_record()
    elsewhere = record.model_copy(update={"environment": {"device": "cpu", "processor": "abacus"}})
    at_once = record.model_copy(update={"jobs": 2})
    assert accuracy_incomparable_reason(record, elsewhere) == accuracy_incomparable_reason(record, at_once) == ""
    assert incomparable_times(elsewhere, record).why == "processor abacus, not None"
    assert incomparable_times(record, at_once).why == "2 cells ran at once"


def test_other_code_is_named() -> None:
    """Runs of other versions of a common file are no pair; a baseline may be of other code, as of another torch."""
    record = make_record().model_copy(update={"code": {"a.py": "1", "net.py": "2"}})
    other = record.model_copy(update={"code": {"b.py": "1", "net.py": "3"}})
    assert accuracy_incomparable_reason(record, other) == "of another version of net.py"
    assert accuracy_incomparable_reason(record, other, same_software=False) == ""
    assert accuracy_incomparable_reason(record, record.model_copy(update={"code": None})) == ""


def test_other_packages_are_named() -> None:
    """Those that the user's code imports, numpy aside, which torch imports anyway."""
    record = make_record().model_copy(update={"packages": {"timm": "1.0", "numpy": "2.0"}})
    other = record.model_copy(update={"packages": {"timm": "0.9", "numpy": "1.9"}})
    assert accuracy_incomparable_reason(record, other) == "timm 1.0, not 0.9"


def test_a_switch_of_the_environment_keeps_rows_apart() -> None:
    """AMPCOMPARE_APEX_STRICT brings defects of Apex back."""
    record = make_record()
    strict = record.model_copy(update={"environment": {**record.environment, "AMPCOMPARE_APEX_STRICT": "1"}})
    assert accuracy_incomparable_reason(record, strict) == "AMPCOMPARE_APEX_STRICT unset, not 1"


def test_a_run_that_read_what_another_wrote_has_no_verdict() -> None:
    """Its training may continue another cell's."""
    record = make_record("fp32", 0)
    facts = ScriptFacts(weights=["w"], inherited=["/data/ck.pt", "/data/opt.pt"])
    reader = make_record("half", 3).model_copy(update={"script": facts})
    expected = "half, seed 3, read ck.pt and 1 more, which another run had written"
    assert accuracy_incomparable_reason(reader, record) == expected
    assert accuracy_incomparable_reason(record, reader) == expected
