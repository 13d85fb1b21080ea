"""The name of a cell: a digest of those settings that can change one of its numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ampcompare.runs.settings.recipe import DEFAULT_TASK, OLDER_TARGET

__all__ = ["NON_NUMERIC_SETTINGS", "settings_digest"]

# Settings of a run that change none of its numbers. Exception in `saving`: a resume into another arm
# (`settings_digest`).
NON_NUMERIC_SETTINGS = frozenset({"saving", "guards", "stall_timeout"})
# Settings that older records lack, by group: at these values the digest of a cell does not change.
LATER_SETTINGS: dict[str, dict[str, Any]] = {
    "": {"task": DEFAULT_TASK, "checkpoint_activations": False},
    "optimizer": {"skip_on_device": False, "args": {}},
    "data": {"sequence_length": None},
}
# The same for settings of a run outside of the recipe, at which `settings_digest` leaves them out.
LATER_RUN_SETTINGS: dict[str, Any] = {"script": None, "eval_precision": []}
NO_DEFAULT = object()


def settings_digest(values: Mapping[str, Any]) -> str:
    """Return the digest of the settings of a run as JSON holds them, which may be those of another version.

    A run that may resume from another arm's checkpoint is a different cell, since another arm trained part of its
    weights.
    """
    numeric = {
        name: value
        for name, value in values.items()
        if name not in NON_NUMERIC_SETTINGS and LATER_RUN_SETTINGS.get(name, NO_DEFAULT) != value
    }
    recipe = values.get("recipe")
    if isinstance(recipe, Mapping):
        numeric["recipe"] = _known_to_all(recipe)
    saving = values.get("saving")
    if isinstance(saving, Mapping) and saving.get("resume") and saving.get("resume_into_other_arm"):
        numeric["resume_into_other_arm"] = True
    return hashlib.sha256(json.dumps(numeric, sort_keys=True).encode()).hexdigest()[:12]


def _known_to_all(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe as the first version would have written them, where it could have."""
    known = {}
    for name, value in recipe.items():
        later = LATER_SETTINGS.get(name, {})
        if isinstance(value, Mapping) and later:
            value = {inner: item for inner, item in value.items() if later.get(inner, NO_DEFAULT) != item}
        if LATER_SETTINGS[""].get(name, NO_DEFAULT) != value:
            known[OLDER_TARGET if name == "target" else name] = value
    return known
