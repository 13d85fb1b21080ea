"""Which versions of libraries a source is for: what is deprecated there, and what may be written instead."""

import re
from typing import NamedTuple

from ampcompare.base.environment.packages import installed_version
from ampcompare.base.errors import ConfigError

NEWEST = (999, 0)


class Versions(NamedTuple):
    """The first two numbers of the versions of libraries; (0, 0) for transformers where that is not there."""

    torch: tuple[int, int] = NEWEST
    transformers: tuple[int, int] = NEWEST


LATEST = Versions()


def installed_or_given_versions(torch: str | None = None) -> Versions:
    """Return the versions that are installed; of torch the newest where none is.

    Args:
        torch: the version of torch instead, such as "2.9".

    Raises:
        ConfigError: this is no version.
    """
    if torch is not None and re.fullmatch(r"\d+\.\d+.*", torch) is None:
        raise ConfigError(f"--torch-version is {torch!r}; give it as 2.9")
    asked = torch or installed_version("torch")
    return Versions(
        NEWEST if asked is None else _first_two_numbers(asked),
        _first_two_numbers(installed_version("transformers")),
    )


def _first_two_numbers(version: str | None) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)
