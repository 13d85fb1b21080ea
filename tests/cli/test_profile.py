"""`ampcompare profile` on a recipe, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import TINY

Call = Callable[..., Any]


@pytest.mark.integration
@pytest.mark.usefixtures("forked_children")
def test_a_recipe(call: Call, tmp_path: Path) -> None:
    """Each arm has a sentence and a column, and the folder gets the record, the page and one trace of both arms."""
    folder = tmp_path / "found"
    steps = ["--steps", "2", "--profiled-steps", "1", "--no-trials"]
    done = call("profile", "--arm", "fp32,O2", *steps, "-o", str(folder), "--arch", "mlp", *TINY)
    assert done.code == 0, done.err
    assert done.out.startswith("fp32 takes ")
    assert "apex:O2 computes in fp32 and rounds" in " ".join(done.out.split())
    for title in ("One step, ms", "Memory at the peak of a step, MiB", "MFU"):
        assert title in done.out
    files = {path.name for path in folder.iterdir()}
    assert files == {"profile.json", "profile.md", "profile.html", "trace.json"}
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        "fp32",
        "apex:O2",
    }
