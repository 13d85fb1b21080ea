"""All mistakes, by code and by name."""

from __future__ import annotations

from ampcompare.mistakes import apex_blocks, apex_calls, removed, style, torch_setup, torch_steps
from ampcompare.mistakes.mistake import Mistake

__all__ = ["BY_NAME", "CODES", "GROUPS", "MISTAKES"]

GROUPS = {
    "AMP1": "Misuse of Apex",
    "AMP2": "Misuse of torch.amp",
    "AMP3": "Removed or deprecated",
    "AMP4": "Style",
}
MISTAKES: tuple[Mistake, ...] = (
    *sorted((*apex_calls.MISTAKES, *apex_blocks.MISTAKES), key=lambda mistake: mistake.code),
    *torch_steps.MISTAKES,
    *torch_setup.MISTAKES,
    *removed.MISTAKES,
    *style.MISTAKES,
)
CODES: dict[str, Mistake] = {mistake.code: mistake for mistake in MISTAKES if mistake.code}
BY_NAME: dict[str, Mistake] = {mistake.name: mistake for mistake in MISTAKES}
