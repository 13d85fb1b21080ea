"""The lists of `ampcompare list`, as functions."""

from pathlib import Path

import pytest

import ampcompare
from ampcompare.base.errors import ConfigError
from ampcompare.experiment.choices import list_choices

KINDS = ("arms", "tasks", "models", "data", "optimizers", "launchers", "recipes", "guards")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_its_function(kind: str) -> None:
    """It returns the rows that the command prints."""
    rows = getattr(ampcompare, f"list_{kind}")()
    assert rows == list_choices()[kind]
    assert all(row.name and isinstance(row.is_available, bool) for row in rows)


def test_run_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder `runs` need not exist, one that was named must."""
    monkeypatch.chdir(tmp_path)
    assert ampcompare.list_runs() == []
    with pytest.raises(ConfigError, match="there is no folder elsewhere"):
        ampcompare.list_runs("elsewhere")
