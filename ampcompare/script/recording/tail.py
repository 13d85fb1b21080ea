"""Read the steps that the recorder of a stack had not written yet when it was killed.

Each is a slot in a file next to the record, which the recorder maps into its memory and removes where it ends.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SLOT = struct.Struct("=9d")  # as in `recorder.py.txt`, which imports nothing of ampcompare
CLOCK_SLACK, CLOCK_SHARE = 1.0, 0.1  # seconds by which its two clocks may disagree


def rows_only_in_tail_file(path: Path, written_rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of a record that are in its tail alone, in their order; none without a tail.

    Args:
        path: of the record.
        written_rows: its rows, the header first.
    """
    run = written_rows[0].get("run") if written_rows else None
    if not isinstance(run, str) or not run.isalnum():  # the record of another recorder
        return []
    try:
        content = path.with_name(f"{path.name}.{run}.tail").read_bytes()
    except OSError:
        return []
    known = {row["optimizer"]: row["step"] for row in written_rows[1:] if row.get("kind") == "step"}
    ends: dict[int, tuple[float, float]] = {}
    rows: list[dict[str, Any]] = []
    for _, step, number, loss, now, day, lr, norm, _ in _complete_slots_of(content):
        optimizer = int(number)
        before, ends[optimizer] = ends.get(optimizer), (now, day)
        if step <= known.get(optimizer, -1):
            continue
        rows.append({"kind": "plain_backward", "loss": loss})
        seconds = None if before is None else _seconds_if_clocks_agree(now - before[0], day - before[1])
        row = {"kind": "step", "optimizer": optimizer, "step": int(step), "applied": True, "seconds": seconds}
        rows.append({**row, "lr": lr, "grad_norm": None if norm == -1 else norm})
    return rows


def _complete_slots_of(content: bytes) -> list[tuple[float, ...]]:
    """Return the slots that are whole: the number of one is its first and its last value."""
    whole = content[: len(content) // SLOT.size * SLOT.size]
    slots = [slot for slot in SLOT.iter_unpack(whole) if slot[0] == slot[-1] and any(slot)]
    return sorted(slot for slot in slots if all(map(math.isfinite, slot[:3])))


def _seconds_if_clocks_agree(seconds: float, by_day: float) -> float | None:
    slack = CLOCK_SLACK + CLOCK_SHARE * max(seconds, by_day)
    return seconds if 0 <= seconds < math.inf and abs(seconds - by_day) <= slack else None
