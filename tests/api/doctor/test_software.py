"""Findings on Python, torch and its build, from answers made here."""

from __future__ import annotations

from typing import Any

import pytest

from ampcompare.api.doctor.ask import ask
from ampcompare.api.doctor.machine import examine_collectives, examine_torch
from ampcompare.base.processes.call import Answer

BUILD = {"version": "2.13.0", "cuda": "13.0", "hip": None, "cudnn": 91301, "distributed": True}
BUILD |= {"nccl": True, "gloo": True, "mpi": False}


def _named(findings: list[Any]) -> dict[str, Any]:
    return {finding.name: finding for finding in findings}


@pytest.mark.parametrize(("cudnn", "shown"), [(91301, "9.13.1"), (8907, "8.9.7")])
def test_a_build_for_cuda(cudnn: int, shown: str) -> None:
    found = _named(examine_torch(Answer({**BUILD, "cudnn": cudnn}, "done"), has_gpu=True))
    assert found["torch"].value == "2.13.0, built for CUDA 13.0"
    assert found["cudnn"].value == f"{shown}, with torch"
    assert {finding.verdict for finding in found.values()} == {"ok"}


def test_a_build_without_cudnn() -> None:
    found = _named(examine_torch(Answer({**BUILD, "cudnn": None}, "done"), has_gpu=True))
    assert (found["cudnn"].verdict, found["cudnn"].value) == ("problem", "not found")


def test_a_cpu_build_beside_a_gpu() -> None:
    answer = Answer({**BUILD, "cuda": None, "cudnn": None}, "done")
    assert examine_torch(answer, has_gpu=False)[0].verdict == "ok"
    finding = examine_torch(answer, has_gpu=True)[0]
    assert finding.verdict == "problem"
    assert "pip install torch torchvision" in finding.remedy[0]


def test_no_torch(site: Any) -> None:
    """Where there is none, it is said how to get it, with and without a GPU."""
    (finding,) = examine_torch(ask("torch_build", path=site.path), has_gpu=False, path=site.path)
    assert (finding.value, finding.verdict) == ("not installed", "problem")
    assert len(finding.remedy) == 2


def test_a_broken_torch(site: Any) -> None:
    """A torch that kills the process is named with its version, to be installed again."""
    site.write("torch/__init__.py", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    site.distribution("torch", "2.13.0")
    (finding,) = examine_torch(ask("torch_build", path=site.path), has_gpu=False, path=site.path)
    assert (finding.value, finding.verdict) == ("2.13.0, which cannot be imported", "problem")
    assert "killed by SIGILL" in finding.reason
    assert finding.remedy == ("pip install --force-reinstall torch==2.13.0",)


def test_collectives() -> None:
    """nccl is needed where torch has CUDA, and is told with its version."""
    assert examine_collectives(BUILD, [2, 27, 7]).value == "nccl 2.27.7, gloo"
    assert examine_collectives({**BUILD, "nccl": False}, None).verdict == "warning"
    assert examine_collectives({**BUILD, "nccl": False, "cuda": None}, None).verdict == "ok"
    assert examine_collectives({**BUILD, "distributed": False}, None).value == "none"
