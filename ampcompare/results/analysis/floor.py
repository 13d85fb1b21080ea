"""The floor of a training: how far its losses and gradient norms move by what changes nothing but roundings.

An envelope has them step by step, from twins of one training. Rows of anyone, with `step`, `loss` and `grad_norm`, are
judged by it: what moves farther than the twins is another training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ampcompare.base.errors import UnusableInput
from ampcompare.base.files.read import FileFault, parse_json, read_text
from ampcompare.base.formatting import format_count
from ampcompare.results.records.document import dump_json

FORMAT, SCHEMA = "ampcompare-floor", 1
OF_FLOOR = 8.0  # by how much new steps may exceed the largest distance of a twin up to that step
ROUNDING = 2e-6  # relative; roundings of fp32 stay below it in one step
MAX_FLOOR = 0.02  # beyond, twins are too far apart to tell anything
MIN_STEPS = 3
MAX_BYTES = 2**31
QUANTITIES = ("loss", "grad_norm")
Answer = Literal["identical", "within the floor", "outside of the floor", "cannot tell"]
EXIT_CODES: dict[Answer, int] = {
    "identical": 0,
    "within the floor": 0,
    "outside of the floor": 1,
    "cannot tell": 2,
}
Rows = Sequence[Mapping[str, float | None]]


@dataclass(frozen=True)
class Envelope:
    """A training and the distances of its twins.

    Attributes:
        rows: of the training: `loss` and `grad_norm` of each step; None where it is not known.
        floors: of each step the largest relative distance of a twin in each quantity, up to that step.
        twins: what was changed in each, with its largest distance of the loss; None for one that failed.
        script: of which it is.
    """

    rows: Rows
    floors: Rows
    twins: Mapping[str, float | None]
    script: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return it as JSON."""
        return dump_json({"format": FORMAT, "schema": SCHEMA, **asdict(self)}) + "\n"


@dataclass(frozen=True)
class FloorJudgment:
    """What was found of new steps; `step` is the first one that is outside, or the first that cannot be judged."""

    answer: Answer
    why: str
    steps: int
    step: int | None = None
    quantity: str = ""
    distance: float | None = None
    floor: float | None = None

    @property
    def exit_code(self) -> int:
        """0 where they are the same training, 1 where they are another one, and 2 where that cannot be told."""
        return EXIT_CODES[self.answer]

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def make_envelope(
    rows: Rows,
    twins: Mapping[str, Rows | None],
    *,
    script: str = "",
    environment: Mapping[str, Any] | None = None,
) -> Envelope:
    """Return how far harmless changes move a training, step by step.

    Args:
        rows: of the training, one for each update, with the quantities of `QUANTITIES` by name.
        twins: rows of each twin by the name of its change; None for a twin that failed.
        script: the name of the script.
        environment: what the training ran on.

    Returns:
        The envelope: the floor of a quantity at a step is the largest relative distance of a twin up to there.
    """
    floors: list[dict[str, float | None]] = []
    largest = dict.fromkeys(QUANTITIES, 0.0)
    known = [twin for twin in twins.values() if twin is not None]
    for number, row in enumerate(rows):
        for name in QUANTITIES:
            found = [
                _relative_distance(row.get(name), twin[number].get(name))
                for twin in known
                if number < len(twin)
            ]
            largest[name] = max([largest[name], *(one for one in found if one is not None)])
        floors.append(dict(largest))
    ends: dict[str, float | None] = {}
    for name, twin in twins.items():
        distances = (
            [] if twin is None else [_relative_distance(*pair) or 0.0 for pair in _pair_losses(rows, twin)]
        )
        ends[name] = None if twin is None else max(distances, default=0.0)
    return Envelope(list(rows), floors, ends, script, environment or {})


def _pair_losses(rows: Rows, others: Rows) -> list[tuple[float | None, float | None]]:
    return [(row.get("loss"), other.get("loss")) for row, other in zip(rows, others, strict=False)]


def _relative_distance(one: float | None, other: float | None) -> float | None:
    """Return the relative distance of two numbers; None where one is unknown, and 1 where one alone is not finite."""
    if one is None or other is None:
        return None
    if not (math.isfinite(one) and math.isfinite(other)):
        return 0.0 if repr(one) == repr(other) else 1.0
    return abs(one - other) / max(abs(one), abs(other)) if one != other else 0.0


def _are_steps_equal(row: Mapping[str, float | None], base: Mapping[str, float | None]) -> bool:
    """Return whether two steps have equal losses, and equal gradient norms where both know theirs."""
    norms = _relative_distance(row.get("grad_norm"), base.get("grad_norm"))
    return _relative_distance(row.get("loss"), base.get("loss")) == 0 and not norms


def is_envelope(path: Path) -> bool:
    """Return whether a file is an envelope, by how it begins."""
    try:
        with path.open(encoding="utf-8") as file:
            return FORMAT in file.read(200)
    except (OSError, ValueError):
        return False


def read_envelope(path: Path) -> Envelope:
    """Read the envelope of harmless changes that `ampcompare floor` has written.

    Raises:
        UnusableInput: the file cannot be read, or is no envelope of this version.
    """
    try:
        raw = parse_json(read_text(path, max_bytes=MAX_BYTES))
        if raw["schema"] != SCHEMA:
            raise UnusableInput(f"{path} has schema {raw['schema']}, and this version reads {SCHEMA}")
        rows, floors = ([_parse_step_row(one) for one in raw[name]] for name in ("rows", "floors"))
        return Envelope(rows, floors, raw["twins"], raw["script"], raw["environment"])
    except (FileFault, KeyError, TypeError, ValueError) as error:
        raise UnusableInput(f"cannot read the envelope {path}: {error}") from None


def read_step_rows(path: Path) -> list[dict[str, float | None]]:
    """Read JSON lines with `loss`, and `grad_norm` where it is known: `steps.jsonl`, or rows of anyone, in order.

    Returns:
        For each line `loss` and `grad_norm`, each None where the line has none; they need not be finite.

    Raises:
        UnusableInput: the file cannot be read, holds other lines, or no loss.
    """
    try:
        lines = [line for line in read_text(path, max_bytes=MAX_BYTES).splitlines() if line.strip()]
        found = [_parse_step_row(parse_json(line)) for line in lines]
    except (FileFault, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnusableInput(
            f"cannot read the steps of {path}: {error}; give lines of JSON with a loss"
        ) from None
    if not any(row["loss"] is not None for row in found):
        raise UnusableInput(
            f"{path} holds no step with a loss; give lines of JSON such as {{'step': 0, 'loss': 1.5}}"
        )
    return found


def _parse_step_row(raw: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: None if raw.get(name) is None else float(raw[name]) for name in QUANTITIES}


def judge_step_rows(rows: Rows, envelope: Envelope) -> FloorJudgment:
    """Judge new steps by the envelope of a training.

    Args:
        rows: of the new training, one for each update.
        envelope: of the training that they are to repeat.

    Returns:
        "identical", "within the floor", "outside of the floor" with the first step that is, or "cannot tell".
    """
    count = min(len(rows), len(envelope.rows))
    pairs = list(zip(rows, envelope.rows, envelope.floors, strict=False))
    if len(rows) == len(envelope.rows) and all(_are_steps_equal(row, base) for row, base, _ in pairs):
        return FloorJudgment("identical", f"the losses of {format_count(count, 'step')} are equal", count)
    blind = next((k for k, (*_, floor) in enumerate(pairs) if (floor["loss"] or 0.0) > MAX_FLOOR), count)
    for number, (row, base, floor) in enumerate(pairs[:blind]):
        for name in QUANTITIES:
            distance, least = _relative_distance(row.get(name), base.get(name)), floor.get(name) or 0.0
            if distance is not None and distance > max(OF_FLOOR * least, ROUNDING):
                why = (
                    f"from step {number} on the {name} is {distance:.2g} off, and twins are {least:.2g} apart"
                )
                return FloorJudgment("outside of the floor", why, number + 1, number, name, distance, least)
    if blind < MIN_STEPS:
        why = (
            f"twins are more than {100 * MAX_FLOOR:g} % apart from step {blind} on"
            if blind < count
            else "too few steps"
        )
        return FloorJudgment("cannot tell", why, blind, blind if blind < count else None)
    if len(rows) != len(envelope.rows):
        why = f"there are {len(rows)} steps, not {len(envelope.rows)}; the first {blind} are within the floor"
        return FloorJudgment("cannot tell", why, blind, count)
    rest = f"; the {count - blind} behind them cannot be judged, as twins part" if blind < count else ""
    return FloorJudgment(
        "within the floor", f"{format_count(blind, 'step')} move no more than roundings do{rest}", blind
    )
