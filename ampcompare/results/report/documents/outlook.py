"""The outlook of some arms: a line for each, what all of them share, and on a page the share lost by step."""

from collections.abc import Iterable
from typing import Any

from ampcompare.base.formatting import format_count, format_rough_percent_number, printable_line
from ampcompare.results.records.outlook import Outlook, WatchedFirstSteps
from ampcompare.results.report.document import Document, Figure, Section, Table, Text

HEADS = ("arm", "word", "part", "why")


def outlook_document(outlook: Outlook) -> Document:
    """Return the report: the arms, the share lost by step, and what was run."""
    sections = [
        Section("arms", [Table.from_rows(HEADS, _outlook_rows(outlook), caption="Arms", prose=True)]),
        Section(
            "curve",
            [Figure("lines", lambda: _lost_share_figure_data(outlook.prefix), is_bare=True)],
            "Share of the update lost",
        ),
        Section("basis", [Text([_watched_run_text(outlook)])]),
    ]
    return Document("outlook", sections, outlook, f"Outlook of {outlook.subject}", _watched_run_text(outlook))


def _outlook_rows(outlook: Outlook) -> list[list[str]]:
    rows = []
    for one in outlook.arms:
        why = f"{one.why} -> {one.cure}" if one.cure else one.why
        rows.append([printable_line(one.arm, 60), one.word, one.part or "-", printable_line(why, 400) or "-"])
    return rows


def _lost_share_figure_data(prefix: WatchedFirstSteps) -> dict[str, Any]:
    """Return the share lost by weights of each type, as points in percent of the width and from the top."""
    end = prefix.total if prefix.rates_known and prefix.total else prefix.steps
    lines: list[tuple[int, str, bool]] = []

    def add_line(color: int, steps: Iterable[float], shares: Iterable[float], *, dashes: bool) -> None:
        points = [
            f"{100 * step / end:.2f},{100 * (1 - share):.2f}"
            for step, share in zip(steps, shares, strict=True)
        ]
        lines.append((color, " ".join(points), dashes))

    for color, share in enumerate(prefix.shares.values(), 1):
        add_line(color, share.at, share.at.values(), dashes=False)
        if end > prefix.steps:
            last, count = max(share.at, default=0), len(share.curve)
            ahead = [last + (end - last) * at / max(1, count - 1) for at in range(count)]
            add_line(color, ahead, share.curve, dashes=True)
    return {
        "title": "Share of the update lost by step",
        "ticks": [(100 - share, f"{share} %") for share in (0, 40, 100)],
        "lines": lines,
        "key": [(name, color) for color, name in enumerate(prefix.shares, 1)],
        "caption": f"The share of the update that weights do not take, to step {end}. Solid: measured in "
        f"the first steps. Dashed: computed at the learning rates ahead. Above 40 % an arm will not hold.",
    }


def _training_length_text(prefix: WatchedFirstSteps) -> str:
    """Return how long the training is taken to be, and who says so; "" in what older versions wrote."""
    if prefix.total is None:
        return "it is not known how many the training makes (--steps says it)"
    return f"of {prefix.total} in all, by {prefix.total_from}" if prefix.total_from else ""


def _watched_run_text(outlook: Outlook) -> str:
    """Return what was run, and what it does not cover."""
    prefix = outlook.prefix
    words = [f"{format_count(prefix.steps, 'step')} in fp32"]
    words.append(_training_length_text(prefix))
    words.append(f"learning rates ahead: {prefix.basis}" if prefix.basis else "the learning rate stays")
    if outlook.twin is not None:
        words.append(
            f"a twin from weights changed by 1/512 differs by {format_rough_percent_number(outlook.twin)} %"
        )
    sentence = "; ".join(filter(None, words))
    return f"{sentence[0].upper()}{sentence[1:]}. Not covered: evaluation, and what these steps did not run."
