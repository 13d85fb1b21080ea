"""The files that a profile leaves in a folder."""

from __future__ import annotations

from pathlib import Path

from ampcompare.base.files.run_files import RunFile
from ampcompare.base.files.write import write_atomically
from ampcompare.records.profile import Profile
from ampcompare.records.run import dump_json
from ampcompare.report.base import FORMATS
from ampcompare.report.profile import profile_markdown

__all__ = ["PROFILE", "write_profile"]

PROFILE = f"{RunFile.PROFILE}.json"


def write_profile(profile: Profile, folder: Path) -> list[Path]:
    """Write `profile.json`, `profile.md`, and `profile.html` where the extra for it is installed; return the files.

    Raises:
        EnvironmentUnfit: the folder cannot be written.
    """
    written = [folder / PROFILE, folder / f"{RunFile.PROFILE}.md"]
    write_atomically(written[0], dump_json(profile) + "\n")
    write_atomically(written[1], profile_markdown(profile))
    if not FORMATS["html"].missing:
        from ampcompare.report.html.profile_page import profile_page

        written.append(folder / f"{RunFile.PROFILE}.html")
        write_atomically(written[-1], profile_page(profile))
    return written
