"""Import paths with small fake packages on them."""

from pathlib import Path

import pytest


class Site:
    """A folder that stands for `site-packages`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def path(self) -> list[str]:
        """What an examiner searches; beside it only the standard library, so that nothing real is found."""
        return [str(self.folder), *STANDARD_LIBRARY]

    def write(self, file: str, text: str = "") -> Path:
        """Write one file, with its folders."""
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def distribution(self, name: str, version: str, **files: str) -> None:
        """Write the metadata of an installed distribution."""
        folder = f"{name}-{version}.dist-info"
        self.write(f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for file, text in files.items():
            self.write(f"{folder}/{file.replace('_json', '.json')}", text)


def _standard_library() -> list[str]:
    import sys
    import sysconfig

    folders = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return [entry for entry in sys.path if entry in folders or entry.endswith("lib-dynload")]


STANDARD_LIBRARY = _standard_library()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An empty folder of packages."""
    return Site(tmp_path)
