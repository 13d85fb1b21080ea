"""What commands print on stdout passes `cli/output.py`."""

import ast
import json
from pathlib import Path

import pytest

from ampcompare.cli import output

FOLDER = Path(output.__file__).parent


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_json_is_printed_by_one_function(path: Path) -> None:
    """No other file of `cli` makes the JSON of a result, or prints what `json.dumps` returns."""
    if path.stem == "output":
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert "dump_json" not in imported
    printed = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.echo", "say_on_stdout", "print")
    ]
    assert not [call for call in printed if any("json.dumps" in ast.unparse(each) for each in call.args)]


def test_json_of_what_is_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"loss": float("nan"), "arm": "fp32"}, indent=None)
    output.print_json([1])
    first, rest = capsys.readouterr().out.split("\n", 1)
    assert json.loads(first) == {"loss": "nan", "arm": "fp32"}
    assert rest == "[\n 1\n]\n"
