"""The words of verdicts, as one table shows them: a word, what belongs into a note, and the color."""

from __future__ import annotations

import re

from ampcompare.base.formatting import printable
from ampcompare.records.comparison import ArmSummary
from ampcompare.report.color import Tone

__all__ = ["is_emulated", "is_invalid", "time_tone", "time_words", "tone_of", "word_and_detail"]

TONES: dict[str, Tone] = {
    "identical": "good",
    "equivalent": "good",
    "non-inferior": "good",
    "better": "good",
    "worse": "bad",
    "diverged": "bad",
    "failed": "bad",
    "learned nothing": "bad",
    "inconclusive": "open",
    "conditional": "open",
    "not comparable": "muted",
    "no verdict": "muted",
}
CONDITIONAL = re.compile(r"conditional on (?P<share>.*) seeds \((?P<inner>.*)\)")
IN_THE_LEGEND = ("equivalent", "non-inferior")  # whose detail is the margin


def word_and_detail(verdict: str) -> tuple[str, str]:
    """Return a verdict on accuracy as a word and its reason: `inconclusive` and `≤24 more seeds`; each may be ""."""
    text = printable(verdict, 200)
    conditional = CONDITIONAL.fullmatch(text)
    if conditional:
        return "conditional", f"{conditional['inner']} on {conditional['share']} seeds"
    word, _, detail = text.partition(" (")
    if word in IN_THE_LEGEND:
        return word, ""
    return word, detail.removesuffix(")")


def tone_of(word: str) -> Tone:
    """Return the color of a verdict."""
    return next((tone for start, tone in TONES.items() if word.startswith(start)), "")


def time_words(verdict: str, margin: float) -> str:
    """Return what a verdict on the step time says; "" where it decides nothing.

    Args:
        margin: as a share of the step time.
    """
    word, detail = word_and_detail(verdict)
    said = {
        "better": "faster",
        "worse": "slower",
        "equivalent": "equally fast",
        "non-inferior": f"step time at most {100 * margin:g} % longer",
    }
    return said.get(word, f"speed {word} ({detail})" if word == "conditional" else "")


def time_tone(verdict: str) -> Tone:
    return "" if verdict.startswith("inconclusive") else tone_of(word_and_detail(verdict)[0])


def is_emulated(row: ArmSummary) -> bool:
    """Return whether an arm's 16-bit arithmetic was computed in fp32 and rounded, so that its times say nothing."""
    return bool(row.half and row.half.endswith("emulated"))


def is_invalid(row: ArmSummary) -> bool:
    return bool(row.invalid_time) or row.time_verdict.startswith("invalid")
