"""Entry points and versions are read once, and again where a package has come."""

import importlib.metadata
from pathlib import Path

import pytest

from ampcompare.base.environment.packages import distributions_of, entry_points, installed_version


def install(folder: Path, name: str) -> None:
    """Leave the metadata of a package that registers its name."""
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[some.group]\n{name} = {name}:made\n")


def test_what_is_installed_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that joins the path, and in one that is there already."""
    monkeypatch.syspath_prepend(tmp_path)
    assert entry_points("some.group") == []
    assert installed_version("one") is None
    install(tmp_path, "one")
    assert installed_version("one") == "1"
    assert [entry.value for entry in entry_points("some.group")] == ["one:made"]
    (tmp_path / "more").mkdir()
    install(tmp_path / "more", "two")
    monkeypatch.syspath_prepend(tmp_path / "more")
    assert {entry.name for entry in entry_points("some.group")} == {"one", "two"}
    assert entry_points("another.group") == []


def test_a_module_leads_to_the_distribution_that_installed_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `importlib.metadata` maps them; also from a list of names, and to a module that is compiled."""
    known = importlib.metadata.packages_distributions()
    assert distributions_of(["yaml", "numpy"]) == {*known["yaml"], *known["numpy"]}
    assert distributions_of(known) == {one for names in known.values() for one in names}
    for name, file, text in (
        ("a", "RECORD", "fast.cpython-311-x86_64-linux-gnu.so,,\n"),
        ("b", "top_level.txt", "fast\n"),
    ):
        (tmp_path / f"{name}-1.dist-info").mkdir()
        (tmp_path / f"{name}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (tmp_path / f"{name}-1.dist-info" / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert distributions_of(["fast", "fas"]) == {"a", "b"}
