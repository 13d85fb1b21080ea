"""The files of the forge: they parse, and the workflow runs the scripts that developers run."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def load(file: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / ".github" / file).read_text(encoding="utf-8"))
    return loaded


def test_workflow_runs_our_scripts() -> None:
    """Each script of the workflow exists and can be executed, and check, test and docker-test are among them."""
    jobs = load("workflows/ci.yml")["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    scripts = {command.split()[0] for command in commands if command.startswith("scripts/")}
    assert {"scripts/check", "scripts/test", "scripts/docker-test"} <= scripts
    for script in scripts:
        assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("name", ["ci", "systems", "release"])
def test_workflow_ends(name: str) -> None:
    """A job that hangs is stopped, and none may write to the repository."""
    workflow = load(f"workflows/{name}.yml")
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 60 for job in workflow["jobs"].values())
