"""Compare the log-probabilities that two programs gave to the same tokens, such as a trainer and a sampler.

What a harmless change of one of them makes, such as another batch size, is the floor: less than that says nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ampcompare.base.errors import UnusableInput
from ampcompare.base.files.read import FileFault, parse_json, read_text
from ampcompare.results.analysis.floor import EXIT_CODES, Answer

LOW, HIGH = 0.9, 1.1  # between which a ratio of probabilities counts as equal
MARGIN = 0.1  # share of the floor by which a distance may exceed it
ERRORS = 2.0  # standard errors by which it must exceed that
MIN_TOKENS = 100
MAX_BYTES = 2**31
NAMES = ("logprobs", "logprob", "token_logprobs")


@dataclass(frozen=True)
class LogprobsDistance:
    """How far apart the log-probabilities of two files are.

    Attributes:
        outside: share of the tokens whose ratio of probabilities is outside of 0.9 to 1.1.
        mean_kl: mean over the tokens of r - 1 - log r, which estimates the KL divergence without bias, in nats.
        largest: of all differences of two log-probabilities.
    """

    tokens: int
    outside: float
    mean_kl: float
    largest: float


@dataclass(frozen=True)
class LogprobsJudgment:
    """What was found of two files, and of the twin of the first one; `why` is a sentence."""

    answer: Answer
    why: str
    distance: LogprobsDistance
    floor: LogprobsDistance | None

    @property
    def exit_code(self) -> int:
        """0 where they are no farther apart than the twin, 1 where they are, and 2 where that cannot be told."""
        return EXIT_CODES[self.answer]

    def data(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def judge_logprobs(one: str | Path, other: str | Path, twin: str | Path | None = None) -> LogprobsJudgment:
    """Judge two files of log-probabilities of the same tokens, by the distance of the first to its twin.

    Args:
        one: file of the first program.
        other: file of the other program.
        twin: file of the first program after a harmless change, which says what such changes do; None if there is none.

    Returns:
        "identical", "within the floor" or "outside of the floor" with its reason; "cannot tell" without a usable twin,
        or with fewer than `MIN_TOKENS` tokens.

    Raises:
        UnusableInput: a file cannot be read, holds a number that is no log-probability, or has other tokens.
    """
    first, second = read_logprobs(Path(one)), read_logprobs(Path(other))
    _check_equal_counts(one, first, other, second)
    distance = distance_of_logprobs(first, second)
    if first == second:
        return LogprobsJudgment("identical", "all log-probabilities are equal", distance, None)
    if twin is None:
        why = "there is no twin: give the log-probabilities of the first program after a harmless change, by --twin"
        return LogprobsJudgment("cannot tell", why, distance, None)
    again = read_logprobs(Path(twin))
    _check_equal_counts(one, first, twin, again)
    floor = distance_of_logprobs(first, again)
    if first == again:
        why = "the twin is equal to the first file, so that it is no measure of what harmless changes do"
        return LogprobsJudgment("cannot tell", why, distance, floor)
    if distance.tokens < MIN_TOKENS:
        why = f"{distance.tokens} tokens are too few; {MIN_TOKENS} are needed"
        return LogprobsJudgment("cannot tell", why, distance, floor)
    beyond = [
        name
        for name, per_token in (
            ("share of tokens outside of 0.9 to 1.1", _flags_of_ratios_outside),
            ("mean KL", _kl_divergences),
        )
        if _exceeds_floor(list(per_token(first, second)), list(per_token(first, again)))
    ]
    if beyond:
        verb = "exceeds that" if len(beyond) == 1 else "exceed those"
        why = f"the {' and the '.join(beyond)} {verb} of the twin by more than {100 * MARGIN:g} % and chance"
        return LogprobsJudgment("outside of the floor", why, distance, floor)
    return LogprobsJudgment(
        "within the floor",
        f"they are no farther apart than the twin by more than {100 * MARGIN:g} % and chance",
        distance,
        floor,
    )


def distance_of_logprobs(one: Sequence[float], other: Sequence[float]) -> LogprobsDistance:
    """Return how far apart two sequences of log-probabilities are."""
    return LogprobsDistance(
        tokens=len(one),
        outside=statistics.fmean(_flags_of_ratios_outside(one, other)),
        mean_kl=statistics.fmean(_kl_divergences(one, other)),
        largest=max(abs(second - first) for first, second in zip(one, other, strict=True)),
    )


def read_logprobs(path: Path) -> list[float]:
    """Return the numbers of a file: one a line, a JSON list, or JSON lines with a list or number as `logprobs`."""
    try:
        text = read_text(path, max_bytes=MAX_BYTES)
        try:
            found = list(_logprobs_in_value(parse_json(text)))
        except FileFault:
            found = [
                number
                for line in text.splitlines()
                if line.strip()
                for number in _logprobs_in_value(parse_json(line))
            ]
    except FileFault as fault:
        raise UnusableInput(f"cannot read the log-probabilities of {path}: {fault}") from None
    if not found:
        raise UnusableInput(
            f"{path} holds no log-probabilities; give one a line, or JSON lines with `logprobs`"
        )
    for number, value in enumerate(found, 1):
        if not math.isfinite(value) or value > 0:
            raise UnusableInput(
                f"{path}: number {number} is {value:g}, but a log-probability is finite and not above 0"
            )
    return found


def _logprobs_in_value(value: Any) -> Iterator[float]:
    if isinstance(value, bool) or value is None or isinstance(value, str):
        raise FileFault(f"{value!r} is no number")
    if isinstance(value, dict):
        name = next((name for name in NAMES if name in value), None)
        if name is None:
            raise FileFault(f"a line has no {NAMES[0]}, but {', '.join(map(str, value)) or 'nothing'}")
        yield from _logprobs_in_value(value[name])
    elif isinstance(value, list):
        for item in value:
            yield from _logprobs_in_value(item)
    else:
        yield float(value)


def _check_equal_counts(one: object, first: Sequence[float], other: object, second: Sequence[float]) -> None:
    if len(first) != len(second):
        raise UnusableInput(
            f"{one} has {len(first)} tokens and {other} has {len(second)}; give the same tokens in the same order"
        )


def _flags_of_ratios_outside(one: Sequence[float], other: Sequence[float]) -> Iterator[float]:
    low, high = math.log(LOW), math.log(HIGH)
    return (float(not low <= second - first <= high) for first, second in zip(one, other, strict=True))


def _kl_divergences(one: Sequence[float], other: Sequence[float]) -> Iterator[float]:
    ratios = (second - first for first, second in zip(one, other, strict=True))
    return (math.expm1(min(ratio, 700.0)) - ratio for ratio in ratios)


def _exceeds_floor(distances: Sequence[float], floor: Sequence[float]) -> bool:
    """Return whether a mean exceeds that of the floor by the margin and by chance, token by token."""
    beyond = [value - (1 + MARGIN) * least for value, least in zip(distances, floor, strict=True)]
    error = statistics.stdev(beyond) / math.sqrt(len(beyond))
    return statistics.fmean(beyond) > ERRORS * error
