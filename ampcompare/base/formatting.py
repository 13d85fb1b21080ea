"""Numbers, durations and lines of text as people read them."""

import os
import re
import shutil
import sys
from collections.abc import Sequence

MIB, GIB = 2**20, 2**30  # bytes
MOST_NAMES = 8
UNITS = re.compile(r"(?:(\d+)h)?\s*(?:(\d+)m(?:in)?)?\s*(?:(\d+(?:\.\d+)?)s)?")
CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)")


def format_decimal(value: float, decimals: int, sign: str = "") -> str:
    """Return a number with so many decimals, in which a zero has no minus sign.

    Args:
        value: finite or not.
        decimals: digits behind the point.
        sign: "+" to put a sign before positive numbers too; "" for none.
    """
    text = f"{value:{sign}.{decimals}f}"
    return f"{0.0:{sign}.{decimals}f}" if float(text) == 0 else text


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 step` and `12 steps`.

    Args:
        number: how many; 0 is plural.
        noun: in the singular; its plural must end in s.
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_ordinal(number: int) -> str:
    """Return a number as it counts, such as `6th`."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def format_ranges(numbers: Sequence[int]) -> str:
    """Return numbers as 0-3,8."""
    groups: list[list[int]] = []
    for number in sorted(numbers):
        if groups and number == groups[-1][1] + 1:
            groups[-1][1] = number
        else:
            groups.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in groups)


def first_line_of_text(text: object, otherwise: str = "no message") -> str:
    """Return the first line of a text or of what an error says.

    Args:
        text: whatever `str` makes a text of; blank lines before the first do not count.
        otherwise: returned where the text is empty.
    """
    return (str(text).strip().splitlines() or [otherwise])[0]


def format_duration(seconds: float) -> str:
    """Return `7.48s` below a minute, else `7m48s` or `8h26m45s`; whole seconds give `45s`."""
    if seconds < 60:
        return f"{seconds:.3g}s"
    hours, minutes, rest = _hours_minutes_seconds(seconds)
    return f"{hours}h{minutes:02d}m{rest:02d}s" if hours else f"{minutes}m{rest:02d}s"


def format_rough_duration(seconds: float) -> str:
    """Return a time to the second, and from an hour on to the minute, such as `41s`, `3m20s` or `6h41m`."""
    hours, minutes, rest = _hours_minutes_seconds(seconds)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def _hours_minutes_seconds(seconds: float) -> tuple[int, int, int]:
    minutes, rest = divmod(round(seconds), 60)
    return *divmod(minutes, 60), rest


def parse_duration(text: str) -> float | None:
    """Return the seconds of `8h26m45s`, `30m`, `8:26:45` or `7:48`; None for anything else, plain numbers included."""
    for pattern in (UNITS, CLOCK):
        match = pattern.fullmatch(text.strip())
        if match and any(match.groups()):
            hours, minutes, seconds = (float(part or 0) for part in match.groups())
            return 3600 * hours + 60 * minutes + seconds
    return None


def format_seconds(seconds: float | None, sd: float | None = None) -> str:
    """Return seconds with three digits, and their standard deviation with one, if known.

    Args:
        seconds: without unit in the result; "-" stands for None.
        sd: their standard deviation in seconds; None if it is not known.
    """
    if seconds is None:
        return "-"
    return f"{seconds:.3g}" + (f" ± {sd:.1g}" if sd is not None else "")


def format_percent_number(share: float | None, *, text_if_missing: str = "-") -> str:
    """Return a share of 1 in percent with two decimals, without the sign.

    Args:
        share: 0.5 for a half; None if it is not known.
        text_if_missing: returned for None.
    """
    return text_if_missing if share is None else f"{100 * share:.2f}"


def format_rough_percent_number(share: float) -> str:
    """Return a share of 1 in percent, with two digits below 10 %."""
    return f"{100 * share:.2g}" if share < 0.0995 else f"{100 * share:.0f}"


def format_bytes(size: int) -> str:
    """Return a size in the unit that fits it: `512 B`, `1.5 KiB`, `3.0 MiB` or `2.0 GiB`."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def format_mebibytes(size: int | None, *, decimals: int = 1, text_if_missing: str = "-") -> str:
    """Return bytes in MiB, without the unit.

    Args:
        size: in bytes; None if it is not known.
        decimals: digits behind the point.
        text_if_missing: returned for None.
    """
    return text_if_missing if size is None else f"{size / MIB:.{decimals}f}"


def printable_line(text: str, longest: int = 120, *, keep_end: int = 0, keep_spaces: bool = False) -> str:
    """Return text from a user's names, files or errors as one harmless line, which cannot steer a terminal.

    Args:
        text: of any length; its line breaks and control characters become spaces.
        longest: length in characters; a longer line is cut and has an ellipsis.
        keep_end: characters after the ellipsis.
        keep_spaces: leave runs of spaces as they are, as in a line of a table.
    """
    line = text if keep_spaces else " ".join(text.split())
    if not line.isprintable():
        line = "".join(char if char.isprintable() else " " for char in line)
    if len(line) <= longest:
        return line
    return line[: longest - 1 - keep_end] + "…" + (line[-keep_end:] if keep_end else "")


def format_few_names(names: Sequence[str]) -> str:
    """Return names as a list, of which a long one has only the first."""
    more = len(names) - MOST_NAMES
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:MOST_NAMES])} and {more} more"


def fold_line_to_terminal_width(line: str) -> str:
    """Return a line as lines that fit the terminal that stderr is; whole elsewhere, where programs search it.

    All but the first are two columns further to the right.
    """
    if not sys.stderr.isatty():
        return line
    try:
        width = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        width = 0
    width = width or shutil.get_terminal_size().columns
    if len(line) <= width:
        return line
    import textwrap  # which the first page of help need not wait for

    text = line.lstrip()
    margin = line[: len(line) - len(text)]
    return textwrap.fill(
        text, width, initial_indent=margin, subsequent_indent=f"{margin}  ", break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
