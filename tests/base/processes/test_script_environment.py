"""What makes runs of a script alike stands in the environment of each."""

import pytest

from ampcompare.base.environment.fingerprint import THREAD_VARIABLES
from ampcompare.base.processes.script_environment import script_environment


@pytest.mark.parametrize(("given", "used"), [(None, "0"), ("", "0"), ("random", "0"), ("7", "7")])
def test_strings_hash_alike(given: str | None, used: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the user asks for random hashing; another number of the user's is kept."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    assert script_environment()["PYTHONHASHSEED"] == used


def test_pools_have_as_many_threads_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user sets wins, and without a number nothing is set."""
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    first, *others = THREAD_VARIABLES
    assert not set(THREAD_VARIABLES) & script_environment().keys()
    monkeypatch.setenv(first, "5")
    made = script_environment(3)
    assert (made[first], {made[name] for name in others}) == ("5", {"3"})
