"""Versions of libraries that a source is for."""

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.source import versions
from ampcompare.source.versions import NEWEST, installed_or_given_versions


def test_a_version_is_that_of_the_environment_or_the_one_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = {"torch": "2.13.0+cpu"}
    monkeypatch.setattr(versions, "installed_version", installed.get)
    assert installed_or_given_versions() == ((2, 13), (0, 0))
    assert installed_or_given_versions("2.9.1") == ((2, 9), (0, 0))
    installed.clear()
    assert installed_or_given_versions() == (NEWEST, (0, 0))


@pytest.mark.parametrize("text", ["newest", "2", "", "v2.9"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--torch-version is .*; give it as 2\.9"):
        installed_or_given_versions(text)
