"""Pairs of torch and torchvision, told by fake metadata, and ways in which torchvision imports or not."""

from collections.abc import Callable
from typing import Any

import pytest

from ampcompare.api.doctor import machine
from ampcompare.api.doctor.finding import Check, ask
from ampcompare.api.doctor.machine import examine_vision, fitting_torchvision
from ampcompare.base.processes.call import Answer


@pytest.mark.parametrize(
    ("torch", "vision"),
    [
        ("2.4.1", "0.19"),
        ("2.11.0+cu130", "0.26"),
        ("2.12.0", "0.27"),
        ("2.13.0+cpu", "0.28"),
        ("2.14.1", "0.29"),
        ("3.0", None),
        (None, None),
    ],
)
def test_pairs(torch: str | None, vision: str | None) -> None:
    """The torchvision of a torch is known for every torch 2, and no guess is made beyond."""
    assert fitting_torchvision(torch) == vision


@pytest.fixture
def examined(site: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Check]:
    """Return a function that examines a torchvision of a version next to a torch of a version."""

    def examine(torch: str, vision: str) -> Check:
        monkeypatch.setattr(machine, "installed_version", {"torchvision": vision}.get)
        return examine_vision(ask("vision", path=site.path), torch)

    return examine


def test_mismatch(site: Any, examined: Callable[[str, str], Check]) -> None:
    """A torchvision of another torch is told by its metadata, with the version to install."""
    site.write("torchvision/__init__.py")
    finding = examined("2.13.0+cpu", "0.20.1")
    assert (finding.verdict, finding.facts["fits"]) == ("warning", False)
    assert "torch 2.13.0+cpu takes torchvision 0.28, and 0.20.1 is installed" in finding.reason
    assert finding.remedy[0].startswith("pip install --no-deps --force-reinstall 'torchvision==0.28.*' --index-url ")


def test_mismatch_that_does_not_import(site: Any, examined: Callable[[str, str], Check]) -> None:
    """Where it fails to import too, both the pair and the error are said."""
    site.write("torchvision/__init__.py", "raise ImportError('undefined symbol: x')")
    finding = examined("2.12.0", "0.28.0")
    assert finding.verdict == "problem"
    assert "torch 2.12.0 takes torchvision 0.27" in finding.reason
    assert "undefined symbol: x" in finding.reason
    assert finding.remedy == ("pip install --no-deps --force-reinstall 'torchvision==0.27.*'",)


def test_no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its absence is a note: built-in models need none."""
    monkeypatch.setattr(machine, "installed_version", {}.get)
    finding = examine_vision(Answer({}, "raised", "not installed"), "2.13.0")
    assert (finding.value, finding.verdict) == ("not installed", "note")
    assert "torchvision==0.28.*" in finding.remedy[0]
