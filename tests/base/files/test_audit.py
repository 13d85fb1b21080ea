"""One audit hook of a process for all that listen to events of files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.files import loaded_code
from ampcompare.base.files.loaded_code import on_file_events


def test_listeners_share_one_hook_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python cannot remove a hook, so a second is never added; other events reach nobody."""
    hooks: list[Any] = []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    monkeypatch.setattr(loaded_code, "_is_installed", False)
    monkeypatch.setattr(loaded_code, "_listeners", ())
    seen: dict[str, list[str]] = {"a": [], "b": []}
    ends = {name: on_file_events(lambda event, _, name=name: seen[name].append(event)) for name in seen}
    (hook,) = hooks
    for event in ("open", "builtins.id", "import"):
        hook(event, ())
    ends["a"]()
    ends["a"]()
    hook("os.rename", ())
    assert seen == {"a": ["open"], "b": ["open", "os.rename"]}
