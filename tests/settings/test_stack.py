"""Stacks and the arms that name them."""

from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.experiment.compare import plan_comparison
from ampcompare.experiment.launch.script.launcher import first_weights_config
from ampcompare.experiment.matrix import cross_arms_with_settings, find_reference
from ampcompare.experiment.run_options import CompareOptions
from ampcompare.settings.stack import arms_with_stacks, first_weights_stack, parse_stacks


def test_a_command_line_gets_a_python() -> None:
    stacks = parse_stacks(
        ["old=/envs/old/bin/python3.8", "image=docker run --rm apex:22.10", "c=conda run -n a python"]
    )
    assert stacks["old"].command == ("/envs/old/bin/python3.8",)
    assert stacks["image"].command[-2:] == ("apex:22.10", "python")
    assert stacks["c"].command[-1] == "python"
    assert parse_stacks({"x": "env A=1 /opt/python3 -S"})["x"].command[-1] == "-S"
    assert parse_stacks({"x": "my-python-wrapper"})["x"].command == ("my-python-wrapper",)


@pytest.mark.parametrize("text", ["old", "old=", "1=python", "a b=python", "old='python"])
def test_a_stack_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="--stack"):
        parse_stacks([text])


def test_arms_name_stacks_in_lists() -> None:
    stacks = parse_stacks({"old": "python", "new": "python"})
    read = arms_with_stacks(["fp32,script@old,O2,loss_scale=128@new,bf16", "amp"], stacks)
    assert [(arm, stack.name if stack else None) for arm, stack in read] == [
        ("fp32", None),
        ("script", "old"),
        ("apex:O2,loss_scale=128", "new"),
        ("native:bf16", None),
        ("native:fp16", None),
    ]
    with pytest.raises(ConfigError, match=r"@odl names a stack that is not given.*did you mean 'old'"):
        arms_with_stacks(["script@odl"], stacks)


def test_a_reference_names_its_stack() -> None:
    rows = cross_arms_with_settings(["script@old,script,O2@old"], [], parse_stacks({"old": "python"}))
    assert [row.label for row in rows] == ["script@old", "script", "apex:O2@old"]
    found = [find_reference(rows, name) for name in ("script", "O2@old", "script@old", "O2")]
    assert found == [rows[1], rows[2], rows[0], None]


def test_first_weights_are_those_of_a_stack_that_is_given() -> None:
    stacks = parse_stacks({"old": "python"})
    assert first_weights_stack("old", stacks, has_script=True).name == "old"
    with pytest.raises(
        ConfigError, match=r"--first-weights odl names a stack that is not given.*did you mean 'old'"
    ):
        first_weights_stack("odl", stacks, has_script=True)
    with pytest.raises(ConfigError, match="is for a script after --"):
        first_weights_stack("old", stacks, has_script=False)


def test_cells_of_one_seed_share_first_weights_and_have_names_of_their_own(tmp_path: Path) -> None:
    """The stack needs no arm of its own; what is recorded there depends on the seed, and on no arm."""
    (tmp_path / "train.py").write_text("")
    options: dict[str, Any] = {
        "script": [str(tmp_path / "train.py")],
        "stacks": {"old": "python"},
        "seeds": "0-1",
    }
    arms = ["script", "fp32"]
    own = plan_comparison(CompareOptions(arms, script=options["script"], seeds="0-1"))
    begun = plan_comparison(CompareOptions(arms, first_weights="old", **options))
    assert {cell.digest() for cell in own.plan.cells}.isdisjoint(cell.digest() for cell in begun.plan.cells)
    recorded = {cell.recipe.seed: first_weights_config(cell) for cell in begun.plan.cells}
    assert len({first_weights_config(cell).digest() for cell in begun.plan.cells}) == len(recorded) == 2
    assert [str(cell.stack and cell.stack.name) for cell in recorded.values()] == ["old", "old"]
