"""One trace with all arms as processes, aligned at their first step, for Perfetto. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ampcompare.profiling.trace import STEP

__all__ = ["merged_trace"]

STRIDE = 1_000_000  # between the process numbers of two arms


def merged_trace(traces: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the events of some traces in one, each with an arm's name on its processes.

    Args:
        traces: name of the arm, and its trace; those without a step are left out.
    """
    merged: list[dict[str, Any]] = []
    for place, (name, trace) in enumerate(traces):
        events = trace.get("traceEvents", [])
        starts = [float(event["ts"]) for event in events if event.get("name") == STEP and event.get("ph") == "X"]
        if not starts:
            continue
        begin = min(starts)
        numbers: dict[Any, int] = {}
        for event in events:
            if event.get("ph") == "M" and event.get("name") in ("process_name", "process_labels", "process_sort_index"):
                continue
            number = numbers.setdefault(event.get("pid"), place * STRIDE + len(numbers))
            moved = {**event, "pid": number}
            if "ts" in event:
                moved["ts"] = float(event["ts"]) - begin
            if "id" in event:  # arrows between host and device would join two arms
                moved["id"] = f"{place}:{event['id']}"
            merged.append(moved)
        for old, number in numbers.items():
            what = f"GPU {old}" if isinstance(old, int) and old < 64 else f"{old}"
            for kind, args in (
                ("process_name", {"name": f"{name}"}),
                ("process_labels", {"labels": what}),
                ("process_sort_index", {"sort_index": number}),
            ):
                merged.append({"ph": "M", "name": kind, "pid": number, "tid": 0, "args": args})
    return {"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": merged}
