"""Which row others are compared with."""

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.results.analysis.pairing.reference import default_reference, find_row_named


@pytest.mark.parametrize(
    ("arms", "reference"),
    [(["apex:O2", "fp32", "script"], "script"), (["apex:O2", "fp32"], "fp32"), (["half", "apex:O2"], "half")],
)
def test_the_reference_where_none_is_named(arms: list[str], reference: str) -> None:
    assert default_reference(arms) == reference


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("apex:O2", "apex:O2"),
        ("o2", "apex:O2"),
        ("O2@old", "apex:O2@old"),
        ("half batch_size=64", "half batch_size=64"),
        ("Half", "half batch_size=32"),
        ("bf16", None),
        ("apex:O2@new", None),
    ],
)
def test_the_row_that_a_text_names(text: str, row: str | None) -> None:
    labels = ["apex:O2@old", "apex:O2", "half batch_size=32", "half batch_size=64"]
    assert find_row_named(text, labels) == row


def test_a_text_that_is_no_arm() -> None:
    with pytest.raises(ConfigError, match="unknown backend 'natve'"):
        find_row_named("natve", ["fp32"])
