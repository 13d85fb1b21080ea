"""`SKILL.md` and `llms.txt`: each command is run, ends with a code that is listed, and prints what its schema says."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from ampcompare.cli.group import cli
from tests.modules import ROOT
from tests.test_docs import GIVEN_FILES

SKILL = (ROOT / "SKILL.md").read_text(encoding="utf-8")
FIXABLE = "import torch\nscaler = torch.cuda.amp.GradScaler()\n"
TABLE = "arm,seed,accuracy\n" + "".join(f"a,{seed},75.{seed}\n" for seed in range(5))
# How each command ends in the folder of the test; 0 where it is not named.
ENDS = {"lint --format json train.py": 1, "judge steps.jsonl --against floor.json": 1}
CODE = re.compile(r"(?<![\w.-])(\d{1,2}) (?=[a-z])|(?<![\w.-])(\d{1,2})(?=, \d)")


class Row(NamedTuple):
    """A line of a table: the words of a command, its exit codes, and the schema of its output, if it is JSON."""

    words: str
    codes: str
    schema: Path | None


def _rows() -> list[Row]:
    found = []
    for command, codes, output in re.findall(
        r"^\|[^|]*\| `ampcompare ([^|`]*)` \|([^|]*)\|([^|]*)\|$", SKILL, re.MULTILINE
    ):
        schema = re.search(r"\((docs/schemas/[^)]*)\)", output)
        found.append(Row(command, codes, ROOT / schema[1] if schema else None))
    return found


ROWS = _rows()


def _codes(text: str) -> set[int]:
    return {int(one or other) for one, other in CODE.findall(text)}


def test_every_line_is_read() -> None:
    assert len(ROWS) == SKILL.count("| `ampcompare ") >= 12
    assert len({row.words for row in ROWS}) == len(ROWS)
    assert sum(row.schema is not None for row in ROWS) >= 6


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.words)
def test_exit_codes_are_those_of_the_help(row: Row) -> None:
    """A code of the help that the table lacks, or one that only the table has, is a mistake."""
    name, *words = shlex.split(row.words)
    command: Any = cli.get_command(click.Context(cli), name)
    assert command is not None
    command.make_context(name, list(words), resilient_parsing=False)
    said, _, verified = (command.epilog or "").partition("With --verify")
    helped = _codes(verified if "--verify" in words else said)
    if helped:
        assert helped - {3} <= _codes(row.codes) | {0}
        assert _codes(row.codes) <= helped | {0, 2}


@pytest.mark.slow
def test_each_command_does_what_is_said(tmp_path: Path, forked_python: Any) -> None:
    """In the order of the tables, since one reads what another has written."""
    jsonschema = pytest.importorskip("jsonschema")
    legacy = GIVEN_FILES["train.py"]
    plain = (ROOT / "examples" / "plain.py").read_text(encoding="utf-8")
    gnmt = (ROOT / "examples" / "gnmt.csv").read_text(encoding="utf-8")
    files = {
        "train.py": legacy,
        "copy.py": legacy,
        "fixable.py": FIXABLE,
        "plain.py": plain,
        "gnmt.csv": gnmt,
    }
    files["steps.jsonl"] = 3 * '{"loss": 5.0}\n'
    for name, text in {**files, "old.csv": TABLE, "new.csv": TABLE.replace("75.1", "75.2")}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for row in ROWS:
        done = forked_python.run(
            ["-m", "ampcompare", *shlex.split(row.words)], tmp_path, dict(os.environ), timeout=300
        )
        assert done.returncode == ENDS.get(row.words, 0), (row.words, done.stderr)
        if row.schema is not None:
            schema = json.loads(row.schema.read_text(encoding="utf-8"))
            jsonschema.Draft202012Validator(schema).validate(json.loads(done.stdout))
    assert "torch.amp.GradScaler" in (tmp_path / "copy.py").read_text()
    assert "torch.amp.GradScaler" in (tmp_path / "fixable.py").read_text()
    assert (tmp_path / "train.py").read_text() == legacy


@pytest.mark.parametrize("name", ["lint", "doctor", "against", "shim"])
def test_schemas_refuse_what_lacks_a_field(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "docs" / "schemas" / f"{name}-1.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert list(jsonschema.Draft202012Validator(schema).iter_errors({}))


def test_links_lead_to_pages() -> None:
    text = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]*)\)", text)
    assert len(links) > 15
    assert not [link for link in links if not (ROOT / "docs" / link).is_file()]
    assert not [link for link in re.findall(r"\]\(([^)#]*)\)", SKILL) if not (ROOT / link).is_file()]
    assert text.startswith("# ampcompare\n\n> ")
