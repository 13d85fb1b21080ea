"""What it means that a cross entropy of probabilities is refused: by autocast of CUDA, or by Apex."""

import re

from ampcompare.base.location import location_of_error

BANNED = re.compile(r"nn\.BCELoss (need float32|are unsafe)")  # Apex, torch
BY_TORCH = "are unsafe"
REMEDY = (
    'call it under torch.autocast("cuda", enabled=False), with .float() on its inputs, or use '
    "binary_cross_entropy_with_logits"
)


def find_banned_loss_text(error: BaseException) -> str | None:
    """Return where autocast refuses a cross entropy, and what to do, if that is what an error says; else None."""
    found = BANNED.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None or found[1] != BY_TORCH:
        return None
    place, said = location_of_error(error), str(error).partition("\n")[0].rstrip(".")
    meaning = f"AMP230: {said}: {REMEDY}"
    return meaning if place is None else f"{place}: {meaning}"
