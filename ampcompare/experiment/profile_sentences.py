"""What the profile in a run directory says about its comparison."""

from __future__ import annotations

import os
from pathlib import Path

from ampcompare.base.errors import ConfigError
from ampcompare.base.files.read import FileFault, read_json
from ampcompare.profiling.reasons import deciding
from ampcompare.records.comparison import Comparison
from ampcompare.records.profile import Profile
from ampcompare.settings.validation import validated

__all__ = ["with_profile"]


def with_profile(comparison: Comparison, folder: Path) -> Comparison:
    """Return a comparison whose headline also says why arms are not faster, as the profile in a folder found.

    Only arms whose settings are those of a run count, next to the reference of the comparison. A file that cannot be
    used is named among the details.
    """
    path = folder / "profile.json"
    if not os.path.lexists(path):
        return comparison
    try:
        found = validated(Profile, read_json(path))
    except (FileFault, ConfigError) as error:
        note = f"{path} is not used: {error}"
        return comparison.model_copy(update={"reading": [*comparison.reading, note]})
    cells = {record.cell for record in comparison.records}
    arms = [arm for arm in found.arms if arm.cell in cells]
    if not arms or arms[0] != found.arms[0] or found.reference != comparison.reference:
        return comparison
    sentences = deciding(found.model_copy(update={"arms": arms}))
    return comparison.model_copy(update={"headline": [*comparison.headline, *sentences]})
