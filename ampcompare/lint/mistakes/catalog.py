"""All mistakes, by code and by name."""

from __future__ import annotations

from ampcompare.lint.mistakes import (
    apex_blocks,
    apex_calls,
    lightning,
    removed,
    style,
    torch_casts,
    torch_gradients,
    torch_setup,
    torch_steps,
)
from ampcompare.lint.mistakes.mistake import Mistake

__all__ = ["BY_NAME", "CODES", "GROUPS", "MISTAKES"]

GROUPS = {
    "AMP1": "Misuse of Apex",
    "AMP2": "Misuse of torch.amp",
    "AMP3": "Removed or deprecated",
    "AMP4": "Style",
}
PARTS = (apex_calls, apex_blocks, torch_steps, torch_gradients, torch_setup, torch_casts, lightning, removed, style)
MISTAKES: tuple[Mistake, ...] = tuple(
    sorted((mistake for part in PARTS for mistake in part.MISTAKES), key=lambda mistake: mistake.code or "guard")
)
CODES: dict[str, Mistake] = {mistake.code: mistake for mistake in MISTAKES if mistake.code}
BY_NAME: dict[str, Mistake] = {mistake.name: mistake for mistake in MISTAKES}
