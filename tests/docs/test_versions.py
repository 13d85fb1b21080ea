"""The pairs of Python and torch that are claimed, run, and written down: each place names the same."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ampcompare.base.version import NEWEST_TORCH, OLDEST_PYTHON, OLDEST_TORCH

ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of `noxfile.py`; nox need not be installed."""
    nox = SimpleNamespace(options=SimpleNamespace(), session=lambda **_: lambda function: function)
    monkeypatch.setitem(sys.modules, "nox", nox)
    return runpy.run_path(str(ROOT / "noxfile.py"))


@pytest.fixture
def pairs(sessions: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Python, torch and torchvision of each session of nox."""
    found: dict[str, tuple[str, str, str]] = sessions["PAIRS"]
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def test_the_ends_of_what_is_claimed_are_run(pairs: dict[str, tuple[str, str, str]]) -> None:
    pythons, torches, _ = zip(*pairs.values(), strict=True)
    assert (min(map(_numbers, pythons)), min(map(_numbers, torches))) == (OLDEST_PYTHON, OLDEST_TORCH)
    assert max(map(_numbers, torches)) == NEWEST_TORCH
    assert sorted(set(pythons)) == re.findall(r"Python :: (3\.\d+)", SETUP)


def test_the_workflow_and_the_page_have_every_pair(pairs: dict[str, tuple[str, str, str]]) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["versions"]["strategy"]["matrix"]["pair"] == list(pairs)
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (3\.\d+) \| (2\.\d+) ", page, re.MULTILINE)
    assert rows == [(name, python, torch.rpartition(".")[0]) for name, (python, torch, _) in pairs.items()]


def test_the_workflow_records_in_every_old_stack(sessions: dict[str, Any]) -> None:
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))["jobs"][
        "stacks"
    ]
    assert job["steps"][-1]["run"].split() == ["scripts/test-versions", *sessions["STACKS"]]
    installed = str(job["steps"][1]["with"]["python-version"]).split()
    assert {python for python, _ in sessions["STACKS"].values()} < set(installed)


def test_the_lowest_versions_are_those_that_setup_permits() -> None:
    """Of every requirement, of what trains too, to the numbers that setup.py gives."""
    pins = dict(
        re.findall(r"^([\w-]+)==(.+)$", (ROOT / "constraints" / "lowest.txt").read_text(), re.MULTILINE)
    )
    trains = SETUP.partition('"torch": [')[2].partition("]")[0]
    stats = next(line for line in SETUP.splitlines() if line.startswith("STATS = "))
    floors = dict(re.findall(r'"([\w-]+)>=([^"]+)"', SETUP.partition("install_requires")[2] + trains + stats))
    floors["torch"] = "{}.{}".format(*OLDEST_TORCH)
    assert floors.keys() == pins.keys()
    assert {name: pin for name, pin in pins.items() if not f"{pin}.".startswith(f"{floors[name]}.")} == {}
