"""The rows of a comparison, and which of them the others are compared with."""

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.experiment.matrix import (
    DEFAULT_ARMS,
    MatrixRow,
    cross_arms_with_settings,
    find_reference,
    first_row_of_arm,
    rows_of_matrix,
)
from ampcompare.experiment.plan import make_plan_of_rows
from ampcompare.settings.config import RunConfig
from ampcompare.settings.file import Matrix
from ampcompare.settings.stack import parse_stacks

SIZES = (("recipe.batch_size", (16, 32)),)


def _arms(rows: list[MatrixRow]) -> list[str]:
    return [row.arm for row in rows]


def test_arms_are_lists_too() -> None:
    """A text may hold several arms, on the command line and in a file."""
    assert _arms(cross_arms_with_settings(["fp32,bf16", "o2"], ())) == ["fp32", "native:bf16", "apex:O2"]
    assert _arms(rows_of_matrix(Matrix(arms=["fp32,O1"]))) == ["fp32", "apex:O1"]
    assert _arms(rows_of_matrix(Matrix.model_validate({"arms": "fp32,O1"}))) == ["fp32", "apex:O1"]


def test_a_reference_that_is_there_stays_in_its_place() -> None:
    """An arm that a row has is not added again, in whatever spelling."""
    assert _arms(rows_of_matrix(Matrix(), arms=["fp32", "O2"], reference="o2")) == ["fp32", "apex:O2"]
    assert len(rows_of_matrix(Matrix(), reference="apex:O2")) == len(DEFAULT_ARMS)


def test_a_reference_that_is_missing_comes_first() -> None:
    """An arm that no row has is added in front: with every value of a sweep, and to the rows of a file."""
    assert _arms(rows_of_matrix(Matrix(), arms=["bf16"], reference="O2")) == ["apex:O2", "native:bf16"]
    swept = rows_of_matrix(Matrix(), arms=["bf16"], reference="O2", vary=SIZES)
    assert [row.label for row in swept] == [
        *(
            "apex:O2 batch_size=16",
            "apex:O2 batch_size=32",
            "native:bf16 batch_size=16",
            "native:bf16 batch_size=32",
        )
    ]
    rows = Matrix(rows=[{"arm": "half", "recipe.optimizer.lr": 0.1}])
    assert [row.label for row in rows_of_matrix(rows, reference="fp32")] == ["fp32", "half lr=0.1"]


def test_rows_of_a_file_name_stacks_as_the_command_line_does() -> None:
    """A row, and a reference that no row has, may be ARM@NAME; a stack that is not given is refused."""
    stacks = parse_stacks(["old=/envs/old/bin/python"])
    rows = [
        {"arm": "script@old"},
        {"arm": "script"},
        {"arm": "o2,loss_scale=128@old", "recipe.optimizer.lr": 0.1},
    ]
    labels = ["script@old", "script", "apex:O2,loss_scale=128@old lr=0.1"]
    assert [row.label for row in rows_of_matrix(Matrix(rows=rows), stacks=stacks)] == labels
    with_reference = rows_of_matrix(Matrix(rows=rows), stacks=stacks, reference="bf16@old")
    assert [row.label for row in with_reference] == ["native:bf16@old", *labels]
    assert with_reference[0].stack == stacks["old"]
    with pytest.raises(ConfigError, match=r"^@old names a stack that is not given: add --stack old=COMMAND$"):
        rows_of_matrix(Matrix(rows=rows))


def test_a_row_of_a_file_is_one_arm() -> None:
    """A list of arms in one row would be several rows."""
    with pytest.raises(ConfigError, match=r"^rows: 'fp32,bf16' names 2 arms; give each a row of its own$"):
        rows_of_matrix(Matrix(rows=[{"arm": "fp32,bf16"}]))


@pytest.mark.parametrize("rows", [Matrix(rows=[{"arm": "script@old"}]), Matrix(arms=["script@old"])])
def test_a_first_row_in_another_environment_is_refused(rows: Matrix) -> None:
    """What trains one row of a file never trains here what the file has elsewhere."""
    with pytest.raises(ConfigError, match="the first row, script@old, trains in another environment"):
        first_row_of_arm(rows, None)
    assert first_row_of_arm(rows, "fp32") is None


def test_the_reference_of_rows() -> None:
    """By default `script`, else fp32, else the first; else the first row of the arm, or the row of that label."""
    rows = cross_arms_with_settings(["half", "fp32"], SIZES)
    assert find_reference(rows, None) == rows[2]
    assert find_reference(rows[:2], None) == rows[0]
    assert find_reference(rows, "Half") == rows[0]
    assert find_reference(rows, "half batch_size=32") == rows[1]
    assert find_reference(rows, "O2") is None
    with pytest.raises(ConfigError, match="unknown backend 'natve'"):
        find_reference(rows, "natve")


def test_a_plan_holds_its_reference() -> None:
    """The plan names the reference; its cells, folder and seeds are those of another reference."""
    rows = cross_arms_with_settings(["fp32", "O2"], ())
    plan, other = (make_plan_of_rows(RunConfig(), rows, [0, 1], reference) for reference in (None, "O2"))
    assert (plan.reference, other.reference) == ("fp32", "apex:O2")
    assert plan.digest() == other.digest()
    assert {cell.digest() for cell in plan.cells} == {cell.digest() for cell in other.cells}
    with pytest.raises(ConfigError, match="the reference 'half' is not one of the arms fp32, apex:O2"):
        make_plan_of_rows(RunConfig(), rows, [0], "half")
