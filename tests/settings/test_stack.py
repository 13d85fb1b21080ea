"""Stacks and the arms that name them."""

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.experiment.matrix import cross, find_reference
from ampcompare.settings.stack import arms_with_stacks, parse_stacks


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
    rows = cross(["script@old,script,O2@old"], [], parse_stacks({"old": "python"}))
    assert [row.label for row in rows] == ["script@old", "script", "apex:O2@old"]
    found = [find_reference(rows, name) for name in ("script", "O2@old", "script@old", "O2")]
    assert found == [rows[1], rows[2], rows[0], None]
