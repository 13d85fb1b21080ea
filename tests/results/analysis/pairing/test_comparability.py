"""Which settings two runs may differ in, and how a difference is told."""

from typing import Any

from ampcompare.results.analysis.pairing.comparability import (
    accuracy_incomparable_reason,
)
from ampcompare.results.records.run import RunRecord, ScriptFacts
from ampcompare.settings.config import RunConfig
from ampcompare.testing import make_record


def _with(record: RunRecord, **values: Any) -> RunRecord:
    config = RunConfig.model_validate({**record.config.model_dump(), **values})
    return record.model_copy(update={"config": config})


def test_many_differences_are_cut_short() -> None:
    record = make_record()
    recipe = {**record.config.recipe.model_dump(), "epochs": 9, "batch_size": 32, "clip_grad": 1.0, "max_steps": 3}
    assert accuracy_incomparable_reason(_with(record, recipe=recipe), record).endswith("; ...")


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
