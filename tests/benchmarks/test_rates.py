"""Studies of error rates: their judge as arrays, their harness, and the pages that they wrote."""

import json
from pathlib import Path

import numpy as np
import pytest

from ampcompare.results.analysis.effects.step_time import TIME_FLOOR
from ampcompare.results.analysis.inference.effect import paired_effect
from ampcompare.results.analysis.inference.terms import Terms
from ampcompare.results.analysis.inference.verdict import Margin, decide_verdicts
from benchmarks.rates import gates
from benchmarks.rates.__main__ import STUDIES
from benchmarks.rates.arrays import is_winner
from benchmarks.rates.study import Row, Table, lines, run, study, varying, write

PAGES = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


@pytest.mark.parametrize("spread", [0.2, 1.5])
@pytest.mark.parametrize("arms", [1, 8])
def test_gates_of_arrays_agree_with_the_verdicts(spread: float, arms: int) -> None:
    """The arrays fail the arms that `decide` calls worse, or does not show to be at least non-inferior."""
    drawn = np.random.default_rng(17).normal(-0.3, spread, (20, arms, 5))
    failed = gates.failures(drawn)
    for number, comparison in enumerate(drawn):
        effects = [paired_effect(list(arm), [0.0] * 5, gates.FLOOR) for arm in comparison]
        words = [str(verdict) for verdict in decide_verdicts(effects, Margin(gates.MARGIN, "0.5"))]
        assert [word == "worse" for word in words] == list(failed["accuracy:worse"][number])
        unshown = [not word.startswith(("equivalent", "better", "non-inferior")) for word in words]
        assert unshown == list(failed["accuracy:non-inferior"][number])


def test_winners_of_arrays_agree_with_the_verdicts() -> None:
    """The arrays find the arms that `decide` calls better or worse in time, with its practical margin."""
    logs = np.random.default_rng(3).normal(0, 0.02, (60, 4, 3)) + np.array([0.0, 0.03, -0.06])
    found = is_winner(logs)
    assert found.any()
    for winners, its in zip(found, logs, strict=True):
        effects = [paired_effect(list(-its[:, arm]), list(-its[:, 0]), TIME_FLOOR) for arm in (1, 2)]
        words = [str(verdict) for verdict in decide_verdicts(effects, Terms().log_time_margin())]
        assert [word in ("better", "worse") for word in words] == list(winners)


@pytest.mark.parametrize("name", [name for name in STUDIES if name != "gates"])
def test_page_is_what_its_numbers_give(name: str, tmp_path: Path) -> None:
    """Each page is written from the JSON next to it, which has a row for each cell of the grid."""
    data = json.loads((PAGES / f"{name}.json").read_text())
    write(name, data, str(tmp_path / name))
    for file in tmp_path.iterdir():
        assert file.read_text() == (PAGES / file.name).read_text()
    for table in study(name).tables:
        assert not table.cells or len(data["tables"][table.name]) == len(table.cells)


def test_ranges_stand_for_rows() -> None:
    """A line of the page has the lowest and the highest of its rows, except for rows that are shown singly."""
    rows: list[Row] = [
        {"machine": "drift", "seeds": "3", "rate": "10.5 %", "gain": "2.0x"},
        {"machine": "drift", "seeds": "10", "rate": "9.8 %", "gain": "1.9x"},
        {"machine": "hot", "seeds": "3", "rate": "1.0 %", "gain": "1.0x"},
        {"machine": "hot", "seeds": "10", "rate": "2.0 %", "gain": "1.0x"},
    ]
    table = Table("rates", (), dict, by=("machine",), singly={"machine": ("hot",)}, only_json=("gain",))
    drift = {"machine": "drift", "seeds": "3-10", "rate": "9.8-10.5 %"}
    assert lines(table, rows) == [drift, *({key: row[key] for key in drift} for row in rows[2:])]


def test_columns_of_one_value_are_a_sentence() -> None:
    """What all rows share is said once, an empty column not at all, and two rows keep every column."""
    rows = [{"arms": arms, "margin": "0.5", "power": "-"} for arms in ("2", "3", "9")]
    assert varying(rows) == ("In each row: margin 0.5.", [{"arms": "2"}, {"arms": "3"}, {"arms": "9"}])
    assert varying(rows[:2]) == ("", rows[:2])


def test_one_table_can_run_again(tmp_path: Path) -> None:
    """A table that did not run again stays on the page; equal seeds give equal rows."""
    first = run("verdicts", ("metrics",), replicates=1)
    again = run("verdicts", ("metrics",), replicates=1)
    assert first["tables"] == again["tables"]
    kept = json.loads((PAGES / "verdicts.json").read_text())
    write("verdicts", kept, str(tmp_path / "verdicts"))
    write("verdicts", first, str(tmp_path / "verdicts"))
    tables = json.loads((tmp_path / "verdicts.json").read_text())["tables"]
    assert tables == {**kept["tables"], **first["tables"]}


def test_tables_of_one_stream_run_together() -> None:
    """A study whose tables share one stream of random numbers refuses to run some of them."""
    with pytest.raises(SystemExit, match="leave out --part"):
        run("new_images", ("few images",))
