"""What is taken for an optimizer by its name: by `lint`, which says what is, and by `migrate`, which must miss none."""

import pytest

from ampcompare.source.object_kinds import is_optimizer_name, may_be_optimizer_name


@pytest.mark.parametrize(
    "name",
    [
        "opt",
        "_opt",
        "optim",
        "optimizer",
        "optimiser",
        "opts",
        "opt1",
        "opt_d",
        "optG",
        "g_opt",
        "FP16_Optimizer",
    ],
)
def test_a_name_of_an_optimizer_is_one_for_both(name: str) -> None:
    """A name that is surely one of an optimizer may be one, too: no step is seen by `lint` alone."""
    assert is_optimizer_name(name)
    assert may_be_optimizer_name(name)


@pytest.mark.parametrize("name", ["optimizer_kwargs", "optimizer_config", "optimizer_class", "optimum"])
def test_what_may_hold_an_optimizer_is_one_for_migrate_alone(name: str) -> None:
    """Of such an object `lint` says nothing."""
    assert not is_optimizer_name(name)
    assert may_be_optimizer_name(name)


@pytest.mark.parametrize(
    "name", ["options", "option", "optional", "opt_level", "opts_cfg", "copt", "adopt", "OPT"]
)
def test_other_words_that_begin_alike_are_none(name: str) -> None:
    """Options of a command line are the most frequent ones."""
    assert not is_optimizer_name(name)
    assert not may_be_optimizer_name(name)
