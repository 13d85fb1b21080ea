"""Tables that were damaged at random: `judge` ends with a verdict or with one clear line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ampcompare.cli import main

ROUNDS = 500
TABLES = (
    "arm,seed,accuracy,time,memory,diverged,note\n"
    "FP32,0,76.1%,8h26m45s,3.5 GB,no,x\nAMP,0,76.3%,12.1h,1.9 GiB,no,y\nFP32,1,76.2,824.4m,2300,,\nAMP,1,NaN,,,yes,\n",
    "math;gpus;BLEU;sd;n;tokens/s\nfp16;1;24.59;0.1;3;66k\nfp32;1;24.71;0.2;3;21346\nfp16;4;24.3;0.1;3;196174\n",
    "| Model | Mem (GB) | Top-1 (%) | Top-5 (%) |\n|---|---|---|---|\n| fp32 | 3.5 | 77.01 ± 0.16 | 93 |\n"
    "| amp | 1.9 | 76.88(16) | 93 |\n",
    "arm\twer\ttime (ms)\nfp32\t0.0425\t214 ± 3\namp\t0.041\t~120\n",
)
ODD = (
    *("", "-", "NaN", "inf", "-1", "0", "1e308", "1e-308", "9" * 400, "1e999", "±", "77 ± ", "± 1", "(16)", "1(", "%"),
    *("\x00", "\x1b[2J", "\ud7ff", "٣", '"', "'", "|", ";", "\t", ",", "\n", "#", "arm", "FP32", "accuracy", "n", "sd"),
    *("8:26:45", "1,234.5", "5 apples", "x" * 3000, "1e15", "0.5", "50%", "TRUE", "é", "**76**", "=1+1", "--", "1 2"),
)
OPTIONS = (
    [],
    ["--json"],
    ["--within", "gpus"],
    ["--within", "seed"],
    ["--metric", "bleu"],
    ["--metric", "memory"],
    ["--better", "lower"],
    ["--sd", "0.1", "--runs", "5"],
    ["--margin", "2sd"],
    ["--margin", "10%"],
    ["--setting", "note", "--objective", "accuracy"],
    ["--reference", "amp", "--objective", "memory"],
)


def _damaged(text: str, draw: random.Random) -> str:
    """Replace, insert, remove or double some cells, lines or characters."""
    for _ in range(draw.randint(1, 4)):
        lines = text.split("\n")
        place = draw.randrange(len(lines))
        match draw.randrange(5):
            case 0:
                separator = draw.choice(",;|\t")
                cells = lines[place].split(separator)
                cells[draw.randrange(len(cells))] = draw.choice(ODD)
                lines[place] = separator.join(cells)
            case 1:
                lines.insert(place, draw.choice(lines))
            case 2:
                lines.pop(place)
            case 3:
                at = draw.randrange(len(lines[place]) + 1)
                lines[place] = lines[place][:at] + draw.choice(ODD) + lines[place][at:]
            case _:
                at = draw.randrange(len(lines[place]) + 1)
                lines[place] = lines[place][:at] + lines[place][at + draw.randint(1, 5) :]
        text = "\n".join(lines) or "x"
    return text


def test_damaged_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five hundred damaged tables under all options give exit code 0 or 2, and of 2 exactly one line."""
    path = tmp_path / "table.csv"
    codes = []
    for number in range(ROUNDS):
        draw = random.Random(number)
        text = _damaged(draw.choice(TABLES), draw)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        code = main(["judge", str(path), *draw.choice(OPTIONS)])
        printed = capsys.readouterr()
        assert code in (0, 2), (number, text, printed.err)
        assert code == 0 or (printed.err.count("\n") == 1 and not printed.out), (number, text, printed.err)
        assert "\x1b" not in printed.out + printed.err
        assert "Traceback" not in printed.err
        codes.append(code)
    assert min(codes.count(0), codes.count(2)) > ROUNDS / 10
