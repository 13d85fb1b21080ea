"""Where in the user's code an error came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ampcompare.guards.location import INSTALLED, raised_at


def _run(source: str, file: str, **names: Any) -> Callable[[], None]:
    def run() -> None:
        exec(compile(source, file, "exec"), names)

    return run


@pytest.mark.parametrize(
    ("source", "line"),
    [("\n1 / 0", 2), ("import torch\n\ntorch.ones(4).view(torch.Size([3]))\n", 3), ("exec('1 / 0')", 1)],
)
def test_the_place_is_the_users_innermost_line(tmp_path: Path, source: str, line: int) -> None:
    """Not one of torch or of generated code."""
    file = str(tmp_path / "train.py")
    with pytest.raises((ZeroDivisionError, RuntimeError)) as caught:
        torch.no_grad()(_run(source, file))()
    assert str(raised_at(caught.value.__traceback__)) == f"{file}:{line}"


def test_the_users_line_goes_before_that_of_a_package(tmp_path: Path) -> None:
    """A package that the script calls is named only where nothing of the user's is."""
    package = f"{INSTALLED[0]}trainer/fit.py"
    fail = _run("1 / 0", package)
    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    frames = caught.value.__traceback__
    assert frames is not None
    assert frames.tb_next is not None  # below this file, which is the user's too
    assert str(raised_at(frames.tb_next.tb_next)) == "trainer/fit.py:1"
    file = str(tmp_path / "train.py")
    with pytest.raises(ZeroDivisionError) as caught:
        _run("\n\nexec(code)", file, code=compile("1 / 0", package, "exec"))()
    assert str(raised_at(caught.value.__traceback__)) == f"{file}:3"
    assert raised_at(None) is None
