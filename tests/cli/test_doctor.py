"""`ampcompare doctor` on this machine as it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Call = Callable[..., Any]


def test_doctor_on_this_machine(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One document with all findings; a clone in the current folder is seen; an arm that cannot run gives 4."""
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "setup.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    done = call("doctor", "--json", "--for", "apex:O1,engine=nvidia", "--for", "fp32")
    assert done.code == 4
    data = done.json()
    found = {finding["name"]: finding for finding in data["findings"]}
    assert len(found) == len(data["findings"])
    assert found["torch"]["facts"]["version"] == __import__("torch").__version__
    assert found["torch"]["verdict"] == "ok"
    assert found["apex"]["facts"]["state"] == "namespace"
    assert found["ATEN_CPU_CAPABILITY"]["verdict"] == "warning"
    assert {"python", "torchvision", "processor", "memory", "disk", "threads", "html"} <= set(found)
    assert all(
        finding["remedy"] for finding in data["findings"] if finding["verdict"] in ("warning", "problem")
    )
    assert [(arm["arm"], arm["fits"]) for arm in data["arms"]] == [
        ("apex:O1,engine=nvidia", False),
        ("fp32", True),
    ]
    assert data["verdict"] == "problem"


def test_doctor_where_torch_is_broken(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every import failing the report is still whole; without --for the exit code is 0."""
    from ampcompare.base.processes.call import ChildAnswer

    def ask(probe: str, **options: Any) -> ChildAnswer:
        return ChildAnswer({}, "died", "the process was killed by SIGSEGV")

    monkeypatch.setattr("ampcompare.doctor.examine.ask", ask)
    done = call("doctor")
    assert done.code == 0
    assert "PROBLEM torch" in done.out
    assert "killed by SIGSEGV" in done.out
    assert "memory" in done.out
    assert call("doctor", "--for", "fp32").code == 4
