"""What options need and exclude is declared, and refused by one function."""

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.base.option_rules import is_option_given, refuse_broken_rules, rule_of_exclusion, rule_of_need

NEED = rule_of_need("--shift N", "shift", "--seed N", "seed", "seeds", because=", which it moves")
EXCLUSION = rule_of_exclusion("--open", "opened", "--quiet", "quiet")
NONE = {"shift": None, "seed": None, "seeds": (), "opened": False, "quiet": False}


def test_a_need_is_met_by_any_that_would_do() -> None:
    """An option that needs another is refused alone, and taken with each that it names; 0 is a value."""
    refuse_broken_rules([NEED, EXCLUSION], NONE)
    refuse_broken_rules([NEED], {**NONE, "shift": 0, "seed": 0})
    refuse_broken_rules([NEED], {**NONE, "shift": 0, "seeds": (1, 2)})
    with pytest.raises(ConfigError, match=r"^--shift N needs --seed N, which it moves; give both$"):
        refuse_broken_rules([NEED], {**NONE, "shift": 0})


def test_an_exclusion_is_of_both() -> None:
    """Two options that exclude each other are refused together, and taken one by one."""
    for name in ("opened", "quiet"):
        refuse_broken_rules([EXCLUSION], {**NONE, name: True})
    with pytest.raises(ConfigError, match=r"^--open is not for --quiet; give only one of them$"):
        refuse_broken_rules([EXCLUSION], {**NONE, "opened": True, "quiet": True})


@pytest.mark.parametrize(
    ("value", "given"), [(0, True), ("", True), (None, False), (False, False), ((), False)]
)
def test_what_is_given(value: object, given: bool) -> None:
    """0 and an empty text are values; none, no flag and no repetition are not."""
    assert is_option_given(value) is given
