"""The output of a script: into a log of bounded size, and through the patterns of metrics."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from ampcompare.base.processes.rank_marks import MARKED, MAX_MARKED
from ampcompare.base.secrets.masking import StreamMasker
from ampcompare.settings.script import ScriptMetric

MAX_LOG_BYTES = 2**24
MAX_LINE_BYTES = 2**16
BLOCK = 2**16
COLOR = re.compile(r"\x1b\[[\d;]*m")
INVISIBLE = re.compile(r"\x1b\[[\d;]*m|[\u200b-\u200f\u2060\ufeff]")
UNSIGNED = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
# How a number goes on that a pattern has cut: thousands as in Switzerland and France, a decimal comma, 0x1p3, 1d5.
CUT = re.compile(
    r"\d+(?:['\u2019\u00a0\u2009\u202f]\d{3}(?!\d)|,\d+(?![\d.,])|(?<=\b0)[xX][\da-fA-F]|(?:\.\d*)?[dD][-+]?\d)"
)
UNIT = re.compile(r"[%\u2030a-zA-Z\u00b5\u03bc]{1,12}")
SEPARATED = re.compile(r"([-+]?\d{1,3}(?:[,_]\d{3})+)(?![\d,_])((?:\.\d*)?)")  # thousands
NONFINITE = r"[-+]?(?:(?i:nan|inf(?:inity)?)\b|1\.#[A-Z]+0*)"  # 1.#QNAN and 1.#INF00 of Microsoft's C
BLANKS = r"(?<=[\s=:(])[ \t]+"  # `{:6.2f}` pads


class PrintedValue(float):
    """A value that was printed.

    Attributes:
        step: of its last digit; 0 of a value that is not finite.
        rank: of the process that printed it; None outside of process groups of several ranks.
        passing: whether the next one overwrites it, as a progress bar does, so that their number is arbitrary.
    """

    step: float
    rank: int | None
    passing: bool

    def __new__(cls, text: str, rank: int | None = None, passing: bool = False) -> PrintedValue:
        """Read a number."""
        value = super().__new__(cls, text)
        digits, _, exponent = text.lower().partition("e")
        value.step = (
            0.0 if float(text) - float(text) else 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
        )
        value.rank, value.passing = rank, passing
        return value


class OutputReader:
    """Reads a pipe to its end; run `read_to_end` in a thread.

    Attributes:
        values: of each metric with a pattern, in the order of the output.
        parts: by metric, what its pattern has matched, and the number of which that is a part.
        units: by metric, the letters or % right behind its numbers, each with the first number that it followed.
    """

    def __init__(self, pipe: BinaryIO, log: Path, metrics: Sequence[ScriptMetric]) -> None:
        self._pipe = pipe
        self._log = log
        self._patterns = {
            metric.name: pattern_with_wider_numbers(metric.pattern)
            for metric in metrics
            if metric.pattern is not None
        }
        self._lines: dict[int | None, bytes] = {}  # begun by each rank
        self.values: dict[str, list[float]] = {name: [] for name in self._patterns}
        self.parts: dict[str, tuple[str, str]] = {}
        self.units: dict[str, dict[str, str]] = {}

    def faults_of_matched_values(self) -> dict[str, str]:
        """Return by metric why the values that its pattern has matched cannot be used."""
        mixed: dict[str, str] = {}
        for name, units in self.units.items():
            if len(units) > 1:
                first, other, *_ = [number + unit for unit, number in units.items()]
                mixed[name] = (
                    f"metric {name}: its numbers have several units, {first} and {other}; let its pattern match "
                    "one of them only"
                )
        return mixed | {
            name: f"metric {name}: its pattern takes {part} of {whole}, which may be one number; let its group match "
            r"separators too, as in ([\d.,]+), or let it go on behind the group"
            for name, (part, whole) in self.parts.items()
        }

    def read_to_end(self) -> None:
        """Copy and match all that comes; a progress bar ends its lines by a carriage return."""
        self._written = 0
        self._secrets = StreamMasker()
        rest = b""
        with self._pipe, self._log.open("wb", buffering=0) as self._file:
            while block := self._pipe.read1(BLOCK):  # type: ignore[attr-defined]
                rest = self._log_and_match_complete_text(rest + block)
            self._log_and_match_text_of_rank(rest, None)
            for rank, line in list(self._lines.items()):
                if rank is not None:
                    self._write_to_log(line)
                self._note_metric_values_in_line(line, rank, False)
            self._append_to_log(self._secrets.masked_rest())

    def _log_and_match_complete_text(self, data: bytes) -> bytes:
        """Read what is complete, and return the rest: a text of a rank that has not ended."""
        end = 0
        for found in MARKED.finditer(data):
            self._log_and_match_text_of_rank(data[end : found.start()], None)
            self._log_and_match_text_of_rank(found[2], int(found[1]))
            end = found.end()
        begun = data.find(b"\x1e", end)
        if begun < 0 or len(data) - begun > MAX_MARKED:
            begun = len(data)
        self._log_and_match_text_of_rank(data[end:begun], None)
        return data[begun:]

    def _log_and_match_text_of_rank(self, text: bytes, rank: int | None) -> None:
        """Read what a process has written: into the log at once, or by whole lines where several ranks write."""
        if not text:
            return
        if rank is None:
            self._write_to_log(text)
        *lines, rest = re.split(rb"(?<=[\r\n])", self._lines.get(rank, b"") + text)
        for line in lines:
            if rank is not None:
                self._write_to_log(line)
            self._note_metric_values_in_line(line, rank, line.endswith(b"\r"))
        self._lines[rank] = rest[-MAX_LINE_BYTES:]

    def _write_to_log(self, text: bytes) -> None:
        if self._written < MAX_LOG_BYTES:
            self._append_to_log(self._secrets.mask_what_is_complete(text[: MAX_LOG_BYTES - self._written]))
            if self._written + len(text) > MAX_LOG_BYTES:
                ends = f"\nampcompare: the log ends here, at {MAX_LOG_BYTES // 2**20} MiB\n"
                self._append_to_log(self._secrets.masked_rest() + ends.encode())
        self._written += len(text)

    def _append_to_log(self, data: bytes) -> None:
        """Write, unless the disk is full: a script whose output nobody reads would block, or be killed."""
        with contextlib.suppress(OSError):
            self._file.write(data)

    def _note_metric_values_in_line(self, line: bytes, rank: int | None, passing: bool) -> None:
        if not self._patterns or not line:
            return
        text = line[:MAX_LINE_BYTES].decode("utf-8", errors="replace").replace("−", "-")
        text = INVISIBLE.sub("", text)
        for name, pattern in self._patterns.items():
            for found in pattern.finditer(text):
                number = _untruncated_number_text(found, text)
                if number is None:
                    continue
                if whole := _truncated_number(found, text):
                    self.parts.setdefault(name, (found[1], whole))
                if found.end() == found.end(1) and (unit := _unit_behind_number(found, text)) is not None:
                    self.units.setdefault(name, {}).setdefault(unit, number)
                self.values[name].append(PrintedValue(number, rank, passing))


def pattern_with_wider_numbers(pattern: str) -> re.Pattern[str]:
    r"""Return a pattern whose group, as in `Acc ([\d.]+)`, also matches what a number becomes: nan, inf, or below 0.

    Else the last finite value would stand for a run that has diverged. A sign counts after a space or one of `=:(`, and
    so do blanks, which pad a number that has become shorter.
    """
    place = _first_capturing_group_span(pattern)
    if place is None:
        return re.compile(pattern)
    begin, end = place
    inner = f"(?:{pattern[begin:end]})"
    try:
        padded = rf"(?:{BLANKS})?(?:{NONFINITE}|(?<=[\s=:(])[-+]{inner})|{BLANKS}{inner}"
        return re.compile(rf"{pattern[:begin]}{NONFINITE}|{inner}|{padded}{pattern[end:]}")
    except re.error:  # such as a comment in a verbose pattern
        return re.compile(pattern)


def _first_capturing_group_span(pattern: str) -> tuple[int, int] | None:
    """Return where the inside of the first group that is kept begins and ends; None where it is not found."""
    opened: list[int | None] = []
    number = 0
    while number < len(pattern):
        sign = pattern[number]
        if sign == "\\":
            number += 1
        elif sign == "[":
            number += 1 + pattern.startswith("^", number + 1)
            number += pattern.startswith("]", number)
            while number < len(pattern) and pattern[number] != "]":
                number += 1 + (pattern[number] == "\\")
        elif sign == "(":
            named = pattern.startswith("(?P<", number)
            kept = named or not pattern.startswith("(?", number)
            opened.append((pattern.index(">", number) if named else number) + 1 if kept else None)
        elif sign == ")" and opened:
            begin = opened.pop()
            if begin is not None:
                return begin, number
        number += 1
    return None


def _untruncated_number_text(match: re.Match[str], text: str) -> str | None:
    r"""Return the number that a pattern has matched, whole where it matched a part: `[\d.]+` takes 1.5 of 1.5e-05."""
    own = _number_in_text(match[1])
    if own is None:
        return None
    begin, end = match.span(1)
    first = next((place for place in range(begin, end) if text[place] in "0123456789."), None)
    if first is None or SEPARATED.fullmatch(match[1].strip()):
        return own
    token = next((one for one in UNSIGNED.finditer(text) if one.end() > first), None)
    if token is None or token.start() > first:
        return own
    if token.start() < first or (token.end() > end and match.end() == end):
        sign = "-" if text[begin:first].endswith("-") else ""
        return sign + token[0]
    return own


def _truncated_number(match: re.Match[str], text: str) -> str:
    """Return the number of which a pattern has matched the first digits only; "" if none."""
    begin, end = match.span(1)
    if match.end() != end or text[max(0, begin - 1) : begin] in (",", "_"):
        return ""
    whole = SEPARATED.match(text, begin)
    if whole is None or whole.end() <= end:
        digits = re.search(r"\d", match[1])
        whole = None if digits is None else CUT.match(text, begin + digits.start())
    return "" if whole is None or whole.end() <= end else whole[0]


def _unit_behind_number(match: re.Match[str], text: str) -> str | None:
    """Return the letters, or %, right behind a number, "" if there are none; None where no digits are."""
    begin, end = match.span(1)
    first = re.search(r"\d|\.\d", match[1])
    if first is None:
        return None
    number = SEPARATED.match(text, begin + first.start()) or UNSIGNED.match(text, begin + first.start())
    if number is None:
        return ""
    behind = max(number.end(), end) if match[1][-1:].isdigit() else number.end()
    unit = UNIT.match(text, behind)
    return "" if unit is None else unit[0]


def _number_in_text(text: str | None) -> str | None:
    """Return the number that a text holds as Python reads it; None if it holds none."""
    bare = (text or "").strip().rstrip("%.,;")
    if separated := SEPARATED.fullmatch(bare):
        bare = re.sub("[,_]", "", separated[1]) + separated[2]
    if "1.#" in bare:
        bare = bare.partition("1.#")[0] + ("inf" if "1.#INF" in bare else "nan")
    try:
        float(bare)
    except ValueError:
        return None
    return bare
