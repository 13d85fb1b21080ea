"""`migrate --verify`: train a script as it is and rewritten, on the CPU with the same seed, and compare every step."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampcompare.base.errors import ConfigError, LaunchError
from ampcompare.base.isolate.start import start_command
from ampcompare.source.migrate.finding import NOTE
from ampcompare.source.migrate.project import migrate_file

__all__ = ["Comparison", "Run", "compare_runs", "verify_script"]

# Relative; fp16 keeps 11 bits, and some steps of training make more of a rounding.
ROUNDING = 0.01
# After some steps roundings have grown in single weights, and a vector that starts at 0, as biases of batch norm do, is
# the sum of a few updates. Where losses agree this closely, and scales and skipped steps are equal, tensors are
# compared by their lengths.
CLOSE = 0.004
OF_LENGTH, SMALL, OF_SMALL = 0.1, 0.1, 0.5
EQUAL, WITHIN, DIFFERENT = "equal to the last bit", "within rounding", "different"
# O2 and O3 have no equivalent, so what they train is apart from autocast by more than a rounding where training
# amplifies it. O1 is what they are rewritten to: it shows whether the rewrite is at fault, or the level.
WITHOUT_EQUIVALENT = {"O2", "O3"}
# Some training amplifies a rounding within a few steps: small batches through batch norm, Adam on gradients near 0. How
# much is measured by moving weights by one rounding of fp16 after the first step; above the last, nothing can be told.
AMPLIFIED, TOO_MUCH = 3.0, 0.25


@dataclass(frozen=True)
class Run:
    """What a script trained.

    Attributes:
        losses: of each backward pass.
        scales: before each backward pass.
        applied: for each step, the number of the optimizer and whether it was taken.
        digests: of the parameters after each step, by optimizer.
        weights: after the last step.
        names: of parameters.
        levels: the opt levels of `amp.initialize`, or the classes of the loss scalers.
    """

    losses: list[float | None]
    scales: list[float | None]
    applied: list[tuple[int, bool]]
    digests: dict[str, list[list[str]]]
    weights: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    levels: tuple[str, ...] = ()

    def sums(self) -> str:
        """Return the counts in words."""
        skipped = sum(not taken for _, taken in self.applied)
        return f"{len(self.applied)} steps, {skipped} skipped, {len(self.losses)} backward passes"


@dataclass(frozen=True)
class Comparison:
    """The verdict.

    Attributes:
        verdict: `EQUAL`, `WITHIN` or `DIFFERENT`.
        lines: what was compared, in words.
    """

    verdict: str
    lines: list[str]


def verify_script(path: str, arguments: list[str], *, steps: int, target: str, say: Callable[[str], None]) -> int:
    """Run a script twice and print the comparison; return the exit code.

    Args:
        arguments: of the script.
        steps: at most, of one optimizer.
        target: as for `migrate_file`.
        say: prints a line.

    Raises:
        ConfigError: there is no such script, or it cannot be rewritten.
        LaunchError: one of the runs failed, or trained nothing.
    """
    script = Path(path)
    if not script.is_file():
        raise ConfigError(f"there is no script {path}")
    result = migrate_file(script, target)
    if result.fault is not None:
        raise ConfigError(result.lines()[0])
    if result.by_hand:
        raise ConfigError(
            f"{result.by_hand} line{'s' * (result.by_hand != 1)} of {path} must be rewritten by hand first; "
            f"see them with: ampcompare migrate {path}"
        )
    original = run_script(script, arguments, steps=steps)
    say(f"unchanged, on ampcompare's engine: {original.sums()}")
    rewritten = run_script(script, arguments, steps=steps, rewrite_for=target)
    say(f"rewritten, on {target}: {rewritten.sums()}")
    comparison = compare_runs(original, rewritten)
    for line in comparison.lines:
        say(line)
    verdict = comparison.verdict
    if verdict == DIFFERENT and target == "torch":
        verdict = _without_the_level(script, arguments, steps, original, rewritten, say)
    if verdict != EQUAL and result.migration is not None:
        for each in result.migration.findings:
            if each.kind == NOTE:
                say(f"known difference, line {each.line}: {each.message}")
    say(f"verdict: {verdict}")
    return 1 if verdict == DIFFERENT else 0


def _without_the_level(
    script: Path, arguments: list[str], steps: int, original: Run, rewritten: Run, say: Callable[[str], None]
) -> str:
    """Return the verdict on a difference, after what O1 trains and how much the training amplifies a rounding."""
    levels, level, as_level = sorted(WITHOUT_EQUIVALENT.intersection(original.levels)), None, ""
    if levels:
        level, as_level = "O1", f" of O1; {' and '.join(levels)} has no equivalent in torch.amp"
        original = run_script(script, arguments, steps=steps, opt_level=level)
        say(f"unchanged, at O1: {original.sums()}")
        comparison = compare_runs(original, rewritten)
        for line in comparison.lines:
            say(f"against O1: {line}")
        if comparison.verdict != DIFFERENT:
            return f"{comparison.verdict}{as_level}"
    if _compare_steps(original, rewritten)[0] == DIFFERENT:
        return DIFFERENT
    moved = run_script(script, arguments, steps=steps, opt_level=level, move=True)
    verdict, line = compare_amplified(original, moved, rewritten)
    say(line)
    return DIFFERENT if verdict == DIFFERENT else f"{verdict}{as_level}"


def run_script(
    script: Path,
    arguments: list[str],
    *,
    steps: int,
    rewrite_for: str | None = None,
    opt_level: str | None = None,
    move: bool = False,
) -> Run:
    """Run a script in a child process on the CPU.

    Args:
        rewrite_for: the target of the rewrite; None runs the script as it is.
        opt_level: instead of the script's.
        move: move the weights by one rounding of fp16 after the first step.

    Raises:
        LaunchError: it failed, or no step went through the loss scaler.
    """
    with tempfile.TemporaryDirectory(prefix="ampcompare-verify-") as folder:
        request = {
            "script": str(script),
            "arguments": arguments,
            "steps": steps,
            "target": rewrite_for,
            "opt_level": opt_level,
            "move": move,
            "folder": folder,
        }
        process = subprocess.run(
            start_command("ampcompare.script.legacy.replay", json.dumps(request)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
            check=False,
        )
        which = "the rewritten script" if rewrite_for else f"the unchanged script{f' at {opt_level}' * bool(opt_level)}"
        last = [line for line in process.stderr.decode("utf-8", "replace").splitlines() if line.strip()]
        errors = [line for line in last if not line.startswith("ampcompare:")] or last
        if process.returncode:
            raise LaunchError(f"{which} ended with exit code {process.returncode}: {errors[-1] if errors else ''}")
        run = _read(Path(folder))
        if not run.applied:
            raise LaunchError(f"{which} took no step that a loss scaler or apex.amp saw; there is nothing to compare")
        return run


def _read(folder: Path) -> Run:
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (folder / "record.jsonl").read_text(encoding="utf-8").splitlines()]
    count = max((len(each) for each in trace["digests"].values()), default=0)
    stepped = [number for number, row in enumerate(rows) if row.get("kind") == "step" and row["step"] < count]
    steps = [rows[number] for number in stepped]
    # A run ends at the step after the last one, so backward passes for that step are there or not by chance.
    backwards = [row for row in rows[: stepped[-1] if stepped else 0] if row.get("kind") == "backward"]
    weights: dict[str, Any] = {}
    if (folder / "weights.npz").exists():
        import numpy

        with numpy.load(folder / "weights.npz") as data:
            weights = {key: data[key] for key in data.files}
    return Run(
        [_number(row["loss"]) for row in backwards],
        [_number(row["scale_before"]) for row in backwards],
        [(row["optimizer"], row["applied"]) for row in steps],
        trace["digests"],
        weights,
        trace["names"],
        tuple(row["opt_level"] for row in rows if row.get("kind") == "initialize"),
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def compare_runs(original: Run, rewritten: Run) -> Comparison:
    """Return how the rewritten script trained, against the original."""
    verdicts, lines = [], []
    for verdict, line in (
        _compare_losses(original, rewritten),
        _compare_scales(original, rewritten),
        _compare_steps(original, rewritten),
        _compare_weights(original, rewritten),
    ):
        verdicts.append(verdict)
        lines.append(line)
    order = (EQUAL, WITHIN, DIFFERENT)
    return Comparison(max(verdicts, key=order.index), lines)


def compare_amplified(original: Run, moved: Run, rewritten: Run) -> tuple[str, str]:
    """Return whether the rewritten script is as near to the original as that is to itself with moved weights.

    Args:
        moved: the original, its weights moved by one rounding of fp16 after the first step.
    """
    # As far apart as they have been up to each backward pass. The move acts one pass later than roundings do.
    moves = [*itertools.accumulate(map(_loss_apart, original.losses, moved.losses), max)]
    apart = [*itertools.accumulate(map(_loss_apart, original.losses, rewritten.losses), max)]
    later = [*moves[1:], *moves[-1:]]
    is_near = all(one <= max(ROUNDING, AMPLIFIED * other) for one, other in zip(apart, later, strict=False))
    noise = max(moves, default=0.0)
    words = (
        f"the unchanged script with weights moved by one rounding of fp16: losses differ by up to {noise:.2g}, "
        f"those of the rewritten one by {max(apart, default=0.0):.2g}"
    )
    if not noise <= TOO_MUCH:
        return DIFFERENT, f"{words}: the training amplifies roundings too much to be compared; use fewer --steps"
    for key in original.weights:
        if key not in rewritten.weights or original.weights[key].shape != rewritten.weights[key].shape:
            return DIFFERENT, f"{words}; {_name(original, key)} has another shape"
        if _is_still(rewritten, key) and not _is_still(original, key):
            return DIFFERENT, f"{words}; {_name(original, key)} is stepped by the unchanged script only"
        room = max(OF_LENGTH, AMPLIFIED * _apart(original.weights[key], moved.weights[key]))
        if not _apart(original.weights[key], rewritten.weights[key]) <= room:
            return DIFFERENT, f"{words}; {_name(original, key)} differs by more than roundings do"
    if _compare_steps(original, moved)[0] == DIFFERENT:
        return DIFFERENT, f"{words}; moved, it skips other steps, so nothing can be told: use fewer --steps"
    return (WITHIN if is_near else DIFFERENT), words


def _loss_apart(first: float | None, second: float | None) -> float:
    return 0.0 if _same(first, second) else _relative(first, second)


def _is_still(run: Run, key: str) -> bool:
    """Return whether no step changes a parameter after the first one."""
    number, _, index = key.partition(".")
    return len({step[int(index)] for step in run.digests.get(number, []) if len(step) > int(index)}) <= 1


def _same(first: float | None, second: float | None) -> bool:
    return first == second or (first is not None and second is not None and first != first and second != second)


def _compare_losses(original: Run, rewritten: Run) -> tuple[str, str]:
    pairs = list(zip(original.losses, rewritten.losses, strict=False))
    apart = [(index, a, b) for index, (a, b) in enumerate(pairs, 1) if not _same(a, b)]
    if not apart:
        return EQUAL, f"losses: {EQUAL} in {len(pairs)} backward passes"
    worst = max(_relative(a, b) for _, a, b in apart)
    index, first, second = apart[0]
    verdict = WITHIN if worst <= ROUNDING else DIFFERENT
    return verdict, (
        f"losses: {verdict}; first at backward pass {index}: {first} against {second}; largest relative "
        f"difference {worst:.2g}"
    )


def _relative(first: float | None, second: float | None) -> float:
    if first is None or second is None or first != first or second != second:
        return float("inf")
    return abs(first - second) / max(abs(first), abs(second), 1e-6)


def _compare_scales(original: Run, rewritten: Run) -> tuple[str, str]:
    pairs = [(a or 1.0, b or 1.0) for a, b in zip(original.scales, rewritten.scales, strict=False)]
    for index, (first, second) in enumerate(pairs, 1):
        if first != second:
            # A power of two changes no bit of what does not overflow; what it skips is compared below.
            return WITHIN, f"loss scales: first different at backward pass {index}: {first:g} against {second:g}"
    return EQUAL, "loss scales: equal"


def _compare_steps(original: Run, rewritten: Run) -> tuple[str, str]:
    count = min(len(original.applied), len(rewritten.applied))
    for index in range(count):
        first, second = original.applied[index], rewritten.applied[index]
        if first != second:
            words = ["taken" if each[1] else "skipped" for each in (first, second)]
            return DIFFERENT, f"steps: first different at step {index + 1}: {words[0]} against {words[1]}"
    if len(original.applied) != len(rewritten.applied):
        return DIFFERENT, f"steps: {len(original.applied)} against {len(rewritten.applied)}"
    return EQUAL, "skipped steps: equal"


def _is_close(original: Run, rewritten: Run) -> bool:
    """Return whether losses agree closely, and scales and skipped steps are equal."""
    losses = list(zip(original.losses, rewritten.losses, strict=False))
    return (
        all(_loss_apart(a, b) <= CLOSE for a, b in losses)
        and _compare_scales(original, rewritten)[0] == EQUAL
        and _compare_steps(original, rewritten)[0] == EQUAL
    )


def _compare_weights(original: Run, rewritten: Run) -> tuple[str, str]:
    place = _first_apart(original, rewritten)
    if place is None:
        return EQUAL, f"weights: {EQUAL} after every step"
    worst, where, verdict, small, close = 0.0, "", WITHIN, "", _is_close(original, rewritten)
    keys = [key for key in original.weights if key in rewritten.weights and original.weights[key].size]
    largest = max((float(abs(original.weights[key]).max()) for key in keys), default=0.0)
    for key in keys:
        first, second = original.weights[key], rewritten.weights[key]
        if first.shape != second.shape:
            return DIFFERENT, f"weights: {_name(original, key)} has shape {first.shape} against {second.shape}"
        size = float(abs(first).max())
        difference = float(abs(first - second).max()) / max(size, 1e-6)
        is_small = first.ndim == 1 and size < SMALL * largest
        if close and difference > ROUNDING and _apart(first, second) <= (OF_SMALL if is_small else OF_LENGTH):
            small = f"; more in single weights such as those of {_name(original, key)}"
            continue
        verdict = verdict if difference <= ROUNDING else DIFFERENT
        if not difference <= worst:
            worst, where = difference, key
    step, key = place
    return verdict, (
        f"weights: {verdict}; first at step {step} in {_name(original, key)}; at the end by {worst:.2g} of the largest "
        f"weight at most, in {_name(original, where or key)}{small}"
    )


def _apart(first: Any, second: Any) -> float:
    """Return how far two vectors are apart, in lengths of the first."""
    return float(((first - second) ** 2).sum() ** 0.5) / max(float((first**2).sum() ** 0.5), 1e-12)


def _first_apart(original: Run, rewritten: Run) -> tuple[int, str] | None:
    found: list[tuple[int, str]] = []
    for number, steps in original.digests.items():
        for index, (first, second) in enumerate(zip(steps, rewritten.digests.get(number, []), strict=False), 1):
            apart = [place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b]
            if apart:
                found.append((index, f"{number}.{apart[0]}"))
                break
    return min(found, default=None)


def _name(run: Run, key: str) -> str:
    number, _, index = key.partition(".")
    shape = "x".join(map(str, run.weights[key].shape)) if key in run.weights else ""
    name = run.names.get(key, f"parameter {int(index) + 1}")
    return f"{name} ({shape}) of optimizer {int(number) + 1}"
