"""Progress of real runs on a pseudo-terminal: what is seen while they run, and what is left of it."""

import itertools
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.screen import Screen, run_on_terminal

pytestmark = pytest.mark.integration

COMMAND = [sys.executable, "-m", "ampcompare"]
SMALL = [
    *("--data", "synthetic", "--train-size", "64", "--val-size", "32", "--image-size", "8"),
    *("--batch-size", "16", "--device", "cpu"),
]
MODULE = """
import time
import torch


class Slow(torch.nn.Module):
    first = True

    def __init__(self, num_classes, sample_shape):
        super().__init__()
        self.layer = torch.nn.Linear(sample_shape[0] * sample_shape[1] * sample_shape[2], num_classes)

    def forward(self, x):
        if self.training:
            time.sleep(2.3 if Slow.first else 0.1)
            Slow.first = False
        else:
            time.sleep(0.5)
        return self.layer(x.flatten(1))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder, with a slow model."""
    (tmp_path / "models.py").write_text(MODULE)
    return tmp_path


def frames(pieces: list[tuple[float, str]], width: int = 80) -> list[tuple[float, list[str]]]:
    """What is on the screen after each piece of output, with its time."""
    screen = Screen(width)
    found = [(at, screen.feed(piece).text.splitlines()) for at, piece in pieces]
    assert not screen.wrapped
    return found


@pytest.mark.slow
def test_a_comparison_at_80_columns(folder: Path, forked_python: Any) -> None:
    """What will run; then each phase, and seconds that go on during a long step; the table alone on stdout."""
    words = ["compare", *SMALL, "--arch", "models:Slow", "--arm", "fp32,native:fp16", "--epochs", "1"]
    words += ["--seeds", "0", "--set", "drain_every=1", "-o", "out", "--no-preflight"]
    with (folder / "stdout").open("wb") as stdout:
        code, pieces = run_on_terminal([*COMMAND, *words], folder, stdout=stdout.fileno(), start=forked_python.popen)
    assert code == 0
    seen = frames(pieces)
    arms = r"(fp32, native:fp16|native:fp16, fp32)"
    assert re.fullmatch(rf"2 cells: 2 arms \({arms}\) x 1 seed \(0\); on cpu, 1 thread; into out", seen[0][1][0])
    shown = "\n".join("\n".join(lines) for _, lines in seen)
    for phase in ("training", "evaluating"):  # what comes before can be too short to be drawn
        assert re.search(rf"^(fp32|native:fp16), seed 0  {phase} +[━╸╺ ]+ ", shown, flags=re.MULTILINE), phase
    during = [(at, lines) for at, lines in seen if any(" 0/4  " in line for line in lines)]
    seconds = {line.split()[-1] for _, lines in during for line in lines if " 0/4  " in line}
    assert len(seconds) >= 3
    times = [at for at, _ in seen]
    assert max(after - before for before, after in itertools.pairwise(times) if before > times[0]) < 3
    assert re.search(r"  loss \d\S+ · loss scale \d+ · (about \d+s left · )?\d\S* ms/step · \d+ skipped", shown)
    assert re.search(r"^1 of 2 cells [━╸╺ ]+ \d+s · about \d+s left$", shown, flags=re.MULTILINE)
    last = seen[-1][1]
    assert [line.partition(" ")[0] for line in last][:3] == ["2", "[1/2]", "[2/2]"]
    assert not any("━" in line for line in last)
    assert "\x1b" not in (folder / "stdout").read_text(encoding="utf-8")
    assert (folder / "stdout").read_text(encoding="utf-8").strip()


def test_ctrl_c_leaves_a_clean_terminal(folder: Path, forked_python: Any) -> None:
    """The message of an interruption stands alone in its line, below the lines that stay; no cursor was hidden."""
    sent: list[int] = []

    def look(process: subprocess.Popen[bytes], seen: str) -> None:
        if " 0/400" in seen and not sent:
            sent.append(process.pid)
            process.send_signal(signal.SIGINT)

    words = [
        "compare", *SMALL, "--arch", "models:Slow", "--arm", "fp32", "--epochs", "100", "--seeds", "0", "-o", "out",
        "--no-preflight",
    ]  # fmt: skip
    code, pieces = run_on_terminal([*COMMAND, *words], folder, look=look, width=120, start=forked_python.popen)
    assert code == 130, "".join(piece for _, piece in pieces)
    assert "\x1b[?25" not in "".join(piece for _, piece in pieces)
    assert frames(pieces, 120)[-1][1] == [
        "fp32, seed 0; on cpu, 1 thread; into out",
        "ampcompare: interrupted; the same command starts with the first cell that has no record",
    ]
