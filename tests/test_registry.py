"""Tables of names that other packages can add to."""

from __future__ import annotations

from fractions import Fraction
from importlib.metadata import EntryPoint

import pytest

from ampcompare.errors import BackendUnavailable, ConfigError
from ampcompare.registry import Registry

TABLE = {"fraction": "fractions:Fraction", "decimal": "decimal:Decimal"}


def _register(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, str]) -> None:
    points = [EntryPoint(name, value, "some.group") for name, value in entries]
    monkeypatch.setattr("ampcompare.registry.entry_points", lambda *, group: points if group == "some.group" else [])


def test_a_built_in_name_is_imported_when_asked_for() -> None:
    """A name gives the object that it stands for."""
    assert Registry[Fraction]("some.group", TABLE).get("fraction") is Fraction


def test_an_unknown_name_gives_the_nearest() -> None:
    """A mistyped name is answered with the one that was probably meant, and all others."""
    with pytest.raises(ConfigError, match=r"unknown name 'fractoin': did you mean 'fraction'.*fraction, decimal"):
        Registry[Fraction]("some.group", TABLE).get("fractoin")


def test_names_of_other_packages_come_after_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package adds a name by its entry point alone."""
    _register(monkeypatch, ("complex", "builtins:complex"))
    registry = Registry[complex]("some.group", TABLE)
    assert list(registry.names()) == ["fraction", "decimal", "complex"]
    assert registry.get("complex") is complex


@pytest.mark.parametrize("entries", [[("decimal", "x:y")], [("new", "a:b"), ("new", "c:d")]])
def test_a_name_taken_twice_is_refused(monkeypatch: pytest.MonkeyPatch, entries: list[tuple[str, str]]) -> None:
    """Two packages, or one and ours, cannot claim one name; both are named."""
    _register(monkeypatch, *entries)
    with pytest.raises(ConfigError, match=f"{entries[-1][0]!r} in some.group is registered twice"):
        Registry[object]("some.group", TABLE).names()


@pytest.mark.parametrize("target", ["no_such_module_here:Thing", "fractions:NoSuchThing"])
def test_a_registered_name_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """A broken registration says what it names and why that fails, as a fault of the environment."""
    _register(monkeypatch, ("broken", target))
    with pytest.raises(BackendUnavailable, match=f"registered as {target} and cannot be imported") as caught:
        Registry[object]("some.group", TABLE).get("broken")
    assert caught.value.exit_code == 4
