"""Hooks on imports, of which several may wait for one module."""

import sys
from pathlib import Path

import pytest

from ampcompare.guards.import_hook import ImportHook


def test_two_hooks_await_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "awaited_twice.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    called: list[str] = []

    def note(name: str) -> None:
        called.append(f"{name} {sys.modules['awaited_twice'].value}")

    hooks = [ImportHook({"awaited_twice": lambda name=name: note(name)}) for name in ("a", "b")]  # type: ignore[misc]
    try:
        for hook in hooks:
            hook.begin()
        __import__("awaited_twice")
    finally:
        for hook in hooks:
            hook.end()
        sys.modules.pop("awaited_twice", None)
    assert sorted(called) == ["a 1", "b 1"]
