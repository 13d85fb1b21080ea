"""Which settings two runs may differ in, and how a difference is told."""

from ampcompare.results.analysis.pairing.comparability import (
    accuracy_incomparable_reason,
)
from ampcompare.testing import make_record


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
