"""A new column and a new format are one line each."""

import csv
import io
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from ampcompare.results.records.comparison import Comparison
from ampcompare.results.report.base import FORMATS, Format, Reporter, write_reports
from ampcompare.results.report.columns import COLUMNS, column_of_run_means
from ampcompare.results.report.document import Document, Table
from ampcompare.results.report.terminal import Terminal


class Arms(Reporter):
    """The names of the arms."""

    def document_text(self, document: Document) -> str:
        (table,) = next(
            section for section in document.sections_in_format("arms") if section.name == "measurements"
        ).blocks
        assert isinstance(table, Table)
        return "\n".join(first for first, *_ in table.texts) + "\n"


def test_a_new_column_is_in_every_format(
    make_comparison: Callable[..., Comparison], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line in `COLUMNS` shows a mean over runs in every table, and the value of each run in the CSV."""
    comparison = make_comparison(["fp32", "half"], seeds=3)
    column = column_of_run_means(lambda record: record.config.recipe.seed + 0.25, "{:.3f}".format)
    monkeypatch.setitem(COLUMNS, "seed and a quarter", column)

    for name, form in FORMATS.items():
        if name == "json" or form.missing_packages:  # JSON holds records and summaries, not columns
            continue
        reporter = Terminal(details=True) if name == "table" else form.make_reporter()
        text = reporter.render(comparison)
        assert "seed and a quarter" in text, name
        assert ("1.250" in text) == (name != "csv"), name

    lines = list(csv.DictReader(io.StringIO(FORMATS["csv"].make_reporter().render(comparison))))
    assert [line["seed and a quarter"] for line in lines] == [str(int(line["seed"]) + 0.25) for line in lines]


def test_a_new_format_is_offered_and_written(
    make_comparison: Callable[..., Comparison], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A line in `FORMATS` is a choice of `report --format` and a file of every run directory."""
    monkeypatch.setitem(FORMATS, "arms", Format("tests_arms_format:Arms", "arms.txt"))
    monkeypatch.setitem(sys.modules, "tests_arms_format", sys.modules[__name__])
    write_reports(make_comparison(["fp32", "half"]), tmp_path)
    assert (tmp_path / "arms.txt").read_text(encoding="utf-8") == "fp32\nhalf\n"

    spec = find_spec("ampcompare.cli.report_command")
    assert spec is not None
    assert spec.loader is not None
    command_module = module_from_spec(spec)  # a copy of its own, as a process that starts has
    monkeypatch.setitem(sys.modules, spec.name, command_module)
    spec.loader.exec_module(command_module)
    done = CliRunner().invoke(command_module.command, [str(tmp_path / "report.json"), "--format", "arms"])

    assert (done.output, done.exception) == ("fp32\nhalf\n", None)
