"""Which run directories there are, and what each of them says about itself."""

import json
import os
from pathlib import Path

import pytest

from ampcompare.base.errors import RecordError
from ampcompare.experiment.run_directory import (
    RunDirectory,
    find_run_directories_newest_first,
    require_run_directories_newest_first,
)


def _make(folder: Path, moment: int) -> Path:
    cells = {"fp32@0": "a" * 12, "fp32@1": "b" * 12, "half@0": "c" * 12, "half@7": "d" * 12}
    for cell in list(cells.values())[:3]:
        (folder / "cells" / cell).mkdir(parents=True)
        (folder / "cells" / cell / "record.json").write_text('{"status": "completed"}')
    text = {
        "arms": ["fp32", "half"], "reference": "fp32", "command": "", "order": [], "cells": cells,
        "terms": {"tag": "night"},
    }  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(text))
    (folder / "report.json").write_text(json.dumps({"headline": ["Use half.", "It is fast."]}))
    for path in (folder / "plan.json", folder / "report.json", folder / "cells"):
        os.utime(path, (moment, moment))
    return folder


def test_the_newest_comes_first(tmp_path: Path) -> None:
    """Run directories are ordered by when they changed; files and other folders are none."""
    old, new = _make(tmp_path / "b", 1000), _make(tmp_path / "study" / "a", 2000)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert [run.path for run in find_run_directories_newest_first(tmp_path)] == [new, old]
    assert require_run_directories_newest_first(tmp_path) == [new, old]


def test_none_is_one_clear_line(tmp_path: Path) -> None:
    """Where there is no run directory, the message says where was looked and how to name one."""
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(RecordError, match=r"no run directory in .*, as in: ampcompare report DIR"):
            require_run_directories_newest_first(folder)
    with pytest.raises(RecordError, match="there is no folder"):
        find_run_directories_newest_first(tmp_path / "absent")


def test_what_a_run_says(tmp_path: Path) -> None:
    """A run directory has its tag, arms and seeds, the number of cells done and planned, and the headline."""
    run = RunDirectory(_make(tmp_path / "a", 1000)).brief()
    assert (run.tag, run.arms, run.seeds, run.cells) == ("night", ("fp32", "half"), (0, 1, 7), (3, 4))
    assert (run.headline, run.fault) == ("Use half.", "")


def test_only_results_are_done(tmp_path: Path) -> None:
    """A cell that failed, was interrupted, or whose record is damaged is not counted as done; a diverged one is."""
    folder = _make(tmp_path / "a", 1000)
    texts = ('{"status": "failed"}', '{"status": "diverged"}', "{")
    for cell, text in zip(("a", "b", "c"), texts, strict=True):
        (folder / "cells" / (12 * cell) / "record.json").write_text(text)
    assert RunDirectory(folder).brief().cells == (1, 4)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"cells": 7, "arms": []}', '{"cells": {"x": "y"}, "arms": ["a"]}']
)
def test_a_damaged_plan_is_named(tmp_path: Path, text: str) -> None:
    """A directory whose plan cannot be read has the reason in place of a headline, and hides no other."""
    folder = _make(tmp_path / "a", 1000)
    (folder / "plan.json").write_text(text)
    run = RunDirectory(folder).brief()
    assert run.fault.startswith("cannot be read: ")
    assert not run.headline
