"""Which versions of libraries a source is for: what is deprecated there, and what may be written instead."""

import re
from typing import NamedTuple

from ampcompare.base.environment.packages import installed_version
from ampcompare.base.errors import ConfigError

NEWEST = (999, 0)


class Versions(NamedTuple):
    """The first two numbers of the versions of libraries; (0, 0) for a library that is not there."""

    torch: tuple[int, int] = NEWEST
    transformers: tuple[int, int] = NEWEST


LATEST = Versions()


def known_versions(torch: str | None = None) -> Versions:
    """Return the versions that are installed; where no torch is, as in an environment for tools, the newest torch.

    Args:
        torch: the version of torch instead, such as "2.9".

    Raises:
        ConfigError: this is no version.
    """
    if torch is not None and re.fullmatch(r"\d+\.\d+.*", torch) is None:
        raise ConfigError(f"--torch-version is {torch!r}; give it as 2.9")
    torch = torch or installed_version("torch")
    numbers = NEWEST if torch is None else _numbers(torch)
    return Versions(numbers, _numbers(installed_version("transformers")))


def _numbers(version: str | None) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else (0, 0)
