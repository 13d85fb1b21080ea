"""Where in the user's code an error came from."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.base.location import is_called_by_lightning, location_of_error
from ampcompare.base.python_folders import INSTALLED_PACKAGES

PACKAGE = f"{INSTALLED_PACKAGES[0]}trainer/fit.py"


def place(source: str, file: str, **names: Any) -> str:
    """Return where `source` fails, as if it were in a file."""
    with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
        exec(compile(source, file, "exec"), names)
    error = caught.value
    frames = error.__traceback__
    return str(location_of_error(error.with_traceback(frames.tb_next)))  # this file is the user's too


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("\n1 / 0", 2),
        ("import torch\n\ntorch.no_grad()(lambda: 0)()\ntorch.ones(4).view(torch.Size([3]))\n", 4),
        ("import torch\nm = torch.nn.Linear(2, 2)\nm(torch.ones(3, 3))", 3),
        ("exec('1 / 0')", 1),
    ],
)
def test_the_place_is_the_users_innermost_line(tmp_path: Path, source: str, line: int) -> None:
    file = str(tmp_path / "train.py")
    assert place(source, file) == f"{file}:{line}"


def test_the_users_line_goes_before_that_of_a_package(tmp_path: Path) -> None:
    """A package that the script calls is named only where nothing of the user's is."""
    file = str(tmp_path / "train.py")
    assert place("1 / 0", PACKAGE) == "trainer/fit.py:1"
    assert place("\n\nexec(code)", file, code=compile("1 / 0", PACKAGE, "exec")) == f"{file}:3"
    assert location_of_error(ValueError()) is None


def test_the_traceback_of_another_process_counts() -> None:
    folder = Path(torch.__file__).parent
    lines = [
        '  File "/a/train.py", line 7, in work',
        "    fail()",
        f'  File "{folder}/y.py", line 9, in fail',
        "OSError: full",
    ]
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("\n".join(["Caught OSError", "Traceback (most recent call last):", *lines]))
    assert str(location_of_error(caught.value)) == "/a/train.py:7"


@pytest.mark.parametrize(
    ("name", "is_inside"),
    [
        ("lightning.pytorch.loops.fit", True),
        ("pytorch_lightning.trainer", True),
        ("lightning_fabric.x", False),
    ],
)
def test_what_a_trainer_of_lightning_calls(name: str, is_inside: bool) -> None:
    """The step of a script, at any depth; Fabric's blocks are those of the script."""
    found: list[bool] = []
    exec("step()", {"__name__": name, "step": lambda: found.append(is_called_by_lightning())})
    assert found == [is_inside]
