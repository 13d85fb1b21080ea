"""Packages that only some tasks need."""

from __future__ import annotations

import sys

import pytest

from ampcompare.base.errors import BackendUnavailable
from ampcompare.tasks.catalog import needs_package


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed import is the environment's fault; the line says who needs the package and what pip calls it."""
    monkeypatch.setitem(sys.modules, "PIL", None)
    with (
        pytest.raises(BackendUnavailable, match=r"^images need Pillow, which .* \(.*PIL.*\): pip install pillow$"),
        needs_package("images need", "Pillow"),
    ):
        import PIL  # noqa: F401
