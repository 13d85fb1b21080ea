"""What a script has trained in a verified run, read from what the run leaves in its folder."""

import dataclasses
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampcompare.settings.resume_trace import read_trace_rows

RECORD = "record.jsonl"  # of the run, in its folder; missing where nothing was recorded
UNKNOWN = "unknown"  # what became of `amp.initialize` in a stack


@dataclass(frozen=True)
class ScriptRun:
    """What a script trained.

    Attributes:
        losses: of each backward pass.
        scales: before each backward pass.
        applied: for each step, the number of the optimizer and whether it was taken.
        digests: of the parameters after each step, by optimizer.
        weights: after the last step.
        names: of parameters.
        levels: the opt levels of `amp.initialize`, or the classes of the loss scalers.
        norms: of the gradients that each step was given, by optimizer; None where it was skipped.
        passes: for each call of `backward`, how many operations of each kind gave 16-bit and wider results.
        files: of the script that use Apex, from its folder.
        others: the SHA-256 of each file from elsewhere that it imported and that uses Apex.
        written: files that the script wrote, in copies that are gone: the user's are as they were.
        limits: for which files that does not hold; "" if it holds for all.
        plain_steps: how often an optimizer stepped, whether or not a loss was scaled.
        unchecked_steps: how often an optimizer stepped by itself though a GradScaler had unscaled its gradients.
        initialize: what became of `amp.initialize`: "called", "disabled" or "".
        evaluations: the types of what models returned without gradients.
        evaluation_norms: the norms of that.
        reads: the types in which values came to the host by `cpu()`.
        halves: the 16-bit types of what losses were computed from.
        policy: the factors by which a dynamic loss scale grows and backs off, and its interval; empty for a static one.
        clears: whether a `zero_grad` came before each step, behind the one before.
        clip_norms: `norms`, or what a clipping has found before it clips; where the run is paired with a stack, like
            the next.
        batches: hashes of the first ones.
        draws: hashes of the generators before those forward passes of them that draw random numbers.
        first_changed: how many first weights were not those of the stack, and are now.
        place: where it ran, in words; "" for here.
        is_cut: it was ended behind its last step.
    """

    losses: list[float | None]
    scales: list[float | None]
    applied: list[tuple[int, bool]]
    digests: dict[str, list[list[str]]]
    weights: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    levels: tuple[str, ...] = ()
    norms: dict[str, list[float | None]] = field(default_factory=dict)
    passes: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    files: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    written: list[str] = field(default_factory=list)
    limits: str = ""
    plain_steps: int = 0
    unchecked_steps: int = 0
    initialize: str = ""
    evaluations: tuple[str, ...] = ()
    evaluation_norms: tuple[float, ...] = ()
    reads: tuple[str, ...] = ()
    halves: tuple[str, ...] = ()
    policy: tuple[float, ...] = ()
    clears: tuple[bool, ...] = ()
    clip_norms: dict[str, list[float | None]] = field(default_factory=dict)
    batches: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    first_changed: int = 0
    place: str = ""
    is_cut: bool = False

    def step_counts_text(self) -> str:
        """Return the counts in words."""
        skipped = sum(not taken for _, taken in self.applied)
        return f"{len(self.applied)} steps, {skipped} skipped, {len(self.losses)} backward passes"


def read_run_error(folder: Path) -> str:
    """Return the error that ended a run, with its line; "" where it was not recorded."""
    ends = [row for row in read_trace_rows(folder / RECORD) if row.get("kind") == "end"]
    return str(ends[-1]["error"] or "") if ends else ""


def read_script_run(folder: Path, *, steps: int) -> ScriptRun:
    """Return what a run has left in its folder.

    Args:
        folder: with `trace.json`, the record and weights, where ampcompare followed the script; with the record alone,
            and the last weights, where the recorder of a stack did.
        steps: how many the run was asked for; at that many of one optimizer it was cut.

    Returns:
        The run without `written`, `limits` and `place`, which its process knows.
    """
    return (
        _script_run_from_trace(folder)
        if (folder / "trace.json").exists()
        else _script_run_from_recording(folder, steps)
    )


def _script_run_from_trace(folder: Path) -> ScriptRun:
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    rows = read_trace_rows(folder / RECORD)
    count = max((len(each) for each in trace["digests"].values()), default=0)
    stepped = [number for number, row in enumerate(rows) if row.get("kind") == "step" and row["step"] < count]
    # A run that is cut ends at the step after the last one, whose backward passes are there or not by chance.
    end = len(rows)
    if trace["is_cut"]:
        end = stepped[-1] if stepped else 0
    weights: dict[str, Any] = {}
    if (folder / "weights.npz").exists():
        import numpy

        with numpy.load(folder / "weights.npz") as data:
            weights = {key: data[key] for key in data.files}
    by_step = _make_optimizer_renamer([rows[number] for number in stepped])
    return dataclasses.replace(
        _script_run_from_rows(rows[:end], [rows[number] for number in stepped], rows),
        digests=by_step(trace["digests"]),
        weights=by_step(weights),
        names=by_step(trace["names"]),
        norms=by_step(trace["norms"]),
        passes=[{name: (half, wide) for name, (half, wide) in each.items()} for each in trace["passes"]],
        files=tuple(trace["files"]),
        others=tuple(trace["others"]),
        plain_steps=trace["plain_steps"],
        unchecked_steps=trace["unchecked_steps"],
        initialize=trace["initialize"],
        evaluations=tuple(trace["evaluations"]),
        evaluation_norms=tuple(trace["evaluation_norms"]),
        reads=tuple(trace["reads"]),
        halves=tuple(trace["halves"]),
        policy=tuple(trace["policy"]),
        clears=tuple(trace["clears"]),
        clip_norms=by_step(trace["clip_norms"]),
        batches=tuple(trace["batches"]),
        draws=tuple(trace["draws"]),
        first_changed=trace["first_changed"],
        is_cut=trace["is_cut"],
    )


def _script_run_from_recording(folder: Path, steps: int) -> ScriptRun:
    """Return what the recorder of a stack has written: of the optimizers whose loss was scaled."""
    rows = read_trace_rows(folder / RECORD)
    scaled = {number for row in rows if row.get("kind") == "backward" for number in row["optimizers"]}
    stepped = [row for row in rows if row.get("kind") == "step"]
    if scaled:
        stepped = [row for row in stepped if row["optimizer"] in scaled]
    is_cut = any(row["step"] + 1 >= steps for row in stepped)
    by_step = _make_optimizer_renamer(stepped)
    norms: dict[str, list[float | None]] = {}
    for row in stepped:
        norm = row["grad_norm"]
        norms.setdefault(str(row["optimizer"]), []).append(None if norm is None else float(norm))
    weights = _read_last_weights(folder / "last.pt", {row["optimizer"] for row in stepped})
    none: dict[str, Any] = {"sha256": [], "draws": []}
    batches = next((row for row in rows if row.get("kind") == "batches"), none)
    run = _script_run_from_rows(rows, stepped, rows)
    return dataclasses.replace(
        run,
        weights=by_step(weights),
        norms=by_step(norms),
        clip_norms=by_step(norms),
        passes=[{} for row in rows if row.get("kind") in ("backward", "plain_backward")],
        plain_steps=len(stepped),
        initialize=UNKNOWN if not run.levels else "called",
        batches=tuple(batches["sha256"]),
        draws=tuple(batches["draws"]),
        is_cut=is_cut,
    )


def _read_last_weights(path: Path, optimizers: Collection[int]) -> dict[str, Any]:
    """Return the arrays that the recorder has kept of optimizers, by `NUMBER.PLACE`; none without its file."""
    if not path.exists():
        return {}
    import torch

    last = torch.load(path, map_location="cpu", weights_only=True)
    held = [(number, weights) for number, weights in enumerate(last) if number in optimizers]
    return {f"{number}.{place}": one.numpy() for number, weights in held for place, one in enumerate(weights)}


def _make_optimizer_renamer(steps: list[dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what renames the optimizers of values: by their first step.

    Apex sees all at once, a scaler each at its step.
    """
    order = {
        number: str(place) for place, number in enumerate(dict.fromkeys(row["optimizer"] for row in steps))
    }

    def rename_by_first_step(values: dict[str, Any]) -> dict[str, Any]:
        parts = ((*key.partition("."), value) for key, value in values.items())
        return {f"{order.get(int(number), number)}{dot}{rest}": value for number, dot, rest, value in parts}

    return rename_by_first_step


def _script_run_from_rows(
    rows: list[dict[str, Any]], steps: list[dict[str, Any]], all_rows: list[dict[str, Any]]
) -> ScriptRun:
    """Return what the rows of a record say: backward passes of `rows`, and the steps."""
    backwards = [row for row in rows if row.get("kind") == "backward"]

    def floats_of(key: str) -> list[float | None]:
        return [None if row[key] is None else float(row[key]) for row in backwards]

    order = {number: place for place, number in enumerate(dict.fromkeys(row["optimizer"] for row in steps))}
    applied = [(order[row["optimizer"]], row["applied"]) for row in steps]
    levels = tuple(row["opt_level"] for row in all_rows if row.get("kind") == "initialize")
    return ScriptRun(floats_of("loss"), floats_of("scale_before"), applied, {}, levels=levels)
