"""`apex.parallel.multiproc` starts ranks, keeps logs, and ends with the code of the rank that failed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from ampcompare.apex.parallel.multiproc import main, split_arguments

MODULE = "ampcompare.apex.parallel.multiproc"


def test_arguments_are_taken_apart() -> None:
    """The world size may stand anywhere and in both forms; a rank that was given is dropped."""
    assert split_arguments(["train.py", "--lr", "1", "--world-size", "3", "--rank=7"]) == (3, ["train.py", "--lr", "1"])
    assert split_arguments(["--world-size=2", "train.py"]) == (2, ["train.py"])
    assert split_arguments(["train.py"]) == (None, ["train.py"])
    with pytest.raises(ValueError, match="positive integer, got 'two'"):
        split_arguments(["--world-size", "two"])


def test_ranks_write_to_console_and_logs(tmp_path: Path, forked_python: Any) -> None:
    """Rank 0 prints to the console, rank 1 to its file; both see their arguments."""
    (tmp_path / "train.py").write_text("import sys; print('saw', sys.argv[1:])")
    done = forked_python.run(["-m", MODULE, "train.py", "--x", "--world-size", "2"], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "saw ['--x', '--world-size', '2', '--rank', '0']\n"
    assert (tmp_path / "GPU_1.log").read_text() == "saw ['--x', '--world-size', '2', '--rank', '1']\n"


def test_a_failing_rank_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import sys, time\nif sys.argv[-1] == '1': sys.exit(5)\ntime.sleep(60)")
    start = time.monotonic()
    assert main(["--world-size", "2", "train.py"]) == 5
    assert time.monotonic() - start < 30
    assert main(["--world-size", "0", "train.py"]) == 2
    assert main([]) == 2
    assert "no script given" in capfd.readouterr().err
