"""`%%ampcompare`: the script that a cell becomes, its options, and its errors in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ampcompare
from ampcompare.base.errors import ConfigError, GateFailed, LaunchError
from ampcompare.cli.cell_magic import FIRST, compare_on_notebook_cell, script_of_cell

CELL = """import torch
import beside

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
for step in range(3):
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("score", beside.SCORE)
"""


def test_line_numbers_are_those_of_the_cell() -> None:
    """The line of the magic becomes the line that sets variables; the cell follows it as it is."""
    script = script_of_cell("a = 1\n\nb = 2\n", {"lr": "0.1", "name": "'x'"})
    assert script == f"{FIRST}; lr = 0.1; name = 'x'\na = 1\n\nb = 2\n"


def test_imports_from_future_stay_first() -> None:
    """A cell that begins with such an import still compiles, and variables are set behind it."""
    script = script_of_cell('"""Text."""\nfrom __future__ import annotations\nprint(lr)\n', {"lr": "0.1"})
    compile(script, "cell.py", "exec")
    assert script.index("__future__") < script.index("lr = 0.1") < script.index("print")


@pytest.mark.parametrize(
    ("line", "cell", "words"),
    [
        ("--arm fp32", "x = (", "the cell is not Python: line 2"),
        ("--arm fp32", "%matplotlib inline", "lines with % or !"),
        ("--arm fp32", "# nothing", "the cell is empty"),
        ("--arm 'fp32", "x = 1", "cannot be read"),
        ("--arm fp32 --with", "x = 1", "--with names no variable"),
        ("--arm fp32 --with unknown", "x = 1", "the notebook has no variable"),
        ("--arm fp32 --with=number,model", "x = 1", "a value of type object cannot be written"),
    ],
)
def test_what_cannot_be_a_script_is_refused(
    line: str, cell: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal says what was seen, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=words):
        compare_on_notebook_cell(line, cell, {"number": 1, "model": object()})
    assert not list(tmp_path.iterdir())


def test_an_option_that_does_not_act_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the command: in the place of the comparison that was asked for, none other is trained."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--junit is not for --verify-resume STEP"):
        compare_on_notebook_cell("--verify-resume 3 --junit x", "x = 1", {})


class _Shell:
    """The part of IPython's shell that an extension uses."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {}
        self.magics: dict[tuple[str, str], Any] = {}

    def register_magic_function(self, function: Any, *, magic_kind: str, magic_name: str) -> None:
        self.magics[magic_kind, magic_name] = function


def test_the_extension_adds_the_magic() -> None:
    """`%load_ext ampcompare` finds its function, and an error of the magic is IPython's error without traceback."""
    usage = pytest.importorskip("IPython.core.error").UsageError
    shell = _Shell()
    ampcompare.load_ipython_extension(shell)
    with pytest.raises(usage, match=r"(?i)no such option"):
        shell.magics["cell", "ampcompare"]("--armm fp32", "x = 1")


@pytest.mark.slow
def test_a_cell_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_servers: None) -> None:
    """A cell with a variable and a module next to the notebook trains under two arms; limits and failures raise."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").write_text("SCORE = 7.5\n")
    line = '--arm fp32,bf16 --seeds 0 --device cpu --quiet --with lr --metric "score:max=score ([0-9.]+)"'
    assert compare_on_notebook_cell(f"{line} --emit-cells cells.sh", CELL, {"lr": 0.5}) is None
    assert len(Path("cells.sh").read_text().splitlines()) == 2
    comparison = compare_on_notebook_cell(line, CELL, {"lr": 0.5})
    assert [row.metric_mean for row in comparison.arms] == [7.5, 7.5]
    (script,) = Path("runs", "cells").iterdir()
    assert "ampcompare compare --arm fp32,bf16 --seeds 0 --device cpu --quiet --metric" in comparison.command
    assert comparison.command.endswith(f"-- {script}")
    with pytest.raises(GateFailed, match="native:bf16") as error:
        compare_on_notebook_cell(f"{line} --fail-on score:better", CELL, {"lr": 0.5})
    assert error.value.comparison is not None
    with pytest.raises(LaunchError, match=r"No module named .beside_it. .*nothing else was started"):
        compare_on_notebook_cell(line, CELL.replace("import beside", "import beside_it"), {"lr": 0.5})
