"""The files in the folder of a cell."""

from pathlib import Path

from ampcompare.experiment.launch.cell_files import (
    make_finder_of_other_cells_files_read,
    make_finder_of_stale_files_read,
    move_run_to_previous,
)
from ampcompare.settings.config import RunConfig


def test_files_of_an_earlier_run_are_kept_under_another_name(tmp_path: Path) -> None:
    """Record and steps are renamed together, so that a run that is cut short leaves no old record next to new steps."""
    (tmp_path / "record.json").write_text("old record")
    (tmp_path / "steps.jsonl").write_text("old steps")

    move_run_to_previous(tmp_path)

    assert not (tmp_path / "record.json").exists()
    assert (tmp_path / "record.previous.json").read_text() == "old record"
    assert (tmp_path / "steps.previous.jsonl").read_text() == "old steps"
    move_run_to_previous(tmp_path)
    assert (tmp_path / "record.previous.json").read_text() == "old record"


def test_files_of_an_earlier_attempt_that_are_read_are_named(tmp_path: Path) -> None:
    """Neither what is only written again, nor what lies there unread, nor ampcompare's own files."""
    (tmp_path / "out").mkdir()
    for name in (
        "out/ck.pt",
        "out/log.txt",
        "idle.txt",
        "steps.jsonl",
        "script.rank0.jsonl",
        "config.json",
        "log.txt",
    ):
        (tmp_path / name).write_text("x")
    read = make_finder_of_stale_files_read(tmp_path)
    assert read() == []
    for name in ("out/ck.pt", "steps.jsonl"):
        (tmp_path / name).read_text()
    with (tmp_path / "out/log.txt").open("a") as file:
        file.write("y")
    (tmp_path / "new.txt").write_text("x")
    (tmp_path / "new.txt").read_text()
    assert read() == [str(tmp_path / "out/ck.pt")]


def test_files_that_another_cell_has_left_in_a_shared_folder_are_named(tmp_path: Path) -> None:
    """Not those of the user, nor what the cell writes itself, nor what lies in hidden folders."""
    config = RunConfig(allow_writes=(str(tmp_path / "shared"), str(tmp_path / ".cache")))
    for name in ("shared/input.npy", ".cache/index"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("the user's")
    for expected in ([], [str(tmp_path / "shared/best.pt")]):
        other_files = make_finder_of_other_cells_files_read(config)
        for name in ("shared/best.pt", ".cache/index"):
            with (tmp_path / name).open("a") as file:
                file.write("of a cell")
        assert other_files() == expected
