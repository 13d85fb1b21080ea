"""What a part found: checks that held or not, figures, and what was left out; as one line and as a JSON file."""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
SHOWN = 3  # failed checks that the last line names; the JSON has all


@dataclass(frozen=True)
class Check:
    """One statement, whether it held, and what was seen."""

    name: str
    held: bool
    seen: str = ""


@dataclass
class Report:
    """The findings of one part.

    Attributes:
        says: what it means that all checks held; the end of the last line.
        left_out: what this run could not check, each with the reason.
        figures: numbers for readers of the JSON; no check depends on a reader.
        folder: where PART.json is written, after each check and at the end; None: nowhere.
        facts: the surroundings, for the JSON.
    """

    part: str
    says: str = ""
    checks: list[Check] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    begin: float = field(default_factory=time.perf_counter)
    folder: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    finished: bool = False

    def check(self, name: str, held: bool, seen: str = "") -> None:
        """Add a statement; a failed one is shown at once, with what was seen."""
        self.checks.append(Check(name, held, seen))
        if not held:
            print(f"gpu-check {self.part}: failed: {name}: {seen}", file=sys.stderr, flush=True)
        self.write()

    def leave_out(self, what: str) -> None:
        """Say what was not checked, and why."""
        self.left_out.append(what)

    @property
    def passes(self) -> bool:
        """Whether something was checked, and all of it held."""
        return bool(self.checks) and all(check.held for check in self.checks)

    def line(self, where: str) -> str:
        """Return the line that the part ends with."""
        failed = [check for check in self.checks if not check.held]
        count = f"{len(self.checks) - len(failed)} of {len(self.checks)} checks"
        seconds = f"{time.perf_counter() - self.begin:.0f} s on {where}"
        if self.passes:
            text = f"held {count} in {seconds}: {self.says}"
        else:
            named = "; ".join(f"{check.name}: {check.seen}".rstrip(": ") for check in failed[:SHOWN])
            more = f"; and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
            text = f"FAILED, held {count} in {seconds}: {named or 'nothing was checked'}{more}"
        left = f" | left out: {'; '.join(self.left_out)}" if self.left_out else ""
        return " ".join(f"gpu-check {self.part}: {text}{left}".split())

    def write(self) -> None:
        """Write PART.json, whole or not at all: what was seen so far outlives a part that is ended from outside."""
        if self.folder is None:
            return
        path = self.folder / f"{self.part}.json"
        data = {
            "format": FORMAT,
            "part": self.part,
            "finished": self.finished,
            "held": self.passes and self.finished,
            "says": self.says if self.passes else "",
            "seconds": round(time.perf_counter() - self.begin, 1),
            "environment": self.facts,
            "left_out": self.left_out,
            "checks": [vars(check) for check in self.checks],
            "figures": self.figures,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".json.tmp")
        unfinished.write_text(json.dumps(_finite(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(unfinished, path)


def _finite(value: Any) -> Any:
    """Replace numbers that JSON lacks by the strings "nan", "inf" and "-inf"."""
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def describe_runs(row: Mapping[str, Any]) -> str:
    """Say how the runs of an arm ended, by its row in a comparison."""
    return f"{row['completed']} completed, {row['diverged']} diverged, {row['failed']} failed"


def environment(device: str, rehearse: bool) -> dict[str, Any]:
    """Return what figures depend on; asks torch, and on CUDA the device."""
    import torch

    from ampcompare import __version__

    facts: dict[str, Any] = {
        "rehearsal": rehearse,
        "device": device,
        "ampcompare": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    if not rehearse:
        facts |= {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        }
    return facts
