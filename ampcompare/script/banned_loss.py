"""What it means that a cross entropy of probabilities is refused: by autocast of CUDA, or by Apex."""

import re

from ampcompare.guards.location import raised_at

BANNED = re.compile(r"nn\.BCELoss (need float32|are unsafe)")  # Apex, torch
BY_TORCH = "are unsafe"
MEANING = (
    "AMP230: autocast of CUDA refuses binary_cross_entropy and BCELoss: call them under "
    'torch.autocast("cuda", enabled=False), with .float() on their inputs, or use binary_cross_entropy_with_logits'
)


def find_banned_loss(error: BaseException) -> str | None:
    """Return that autocast refuses a cross entropy of probabilities, with the line, if an error says so; else None."""
    found = BANNED.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None or found[1] != BY_TORCH:
        return None
    place = raised_at(error)
    return MEANING if place is None else f"{place}: {MEANING}"
