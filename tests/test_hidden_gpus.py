"""Tests that are not for a GPU see none, on any machine."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch


def test_a_hidden_gpu_is_seen_by_nobody(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither this process nor one that it starts has a GPU, until the patch is undone."""
    conftest = request.config.pluginmanager.get_plugin(str(request.config.rootpath / "tests" / "conftest.py"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    started: list[bool] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: started.append(True))
    with pytest.MonkeyPatch.context() as patch:
        conftest.hide_gpus(patch)
        assert (torch.cuda.is_available(), torch.cuda.device_count()) == (False, 0)
        asked = "import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
        told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
        assert told.stdout == "''\n"
    assert (torch.cuda.is_available(), torch.cuda.device_count(), started) == (True, 1, [True])


@pytest.mark.parametrize(
    ("fixtures", "marks", "asks"),
    [
        ([], [], False),
        (["tmp_path", "device"], [], True),
        ([], [pytest.mark.requires(cuda=1)], True),
        ([], [pytest.mark.requires(2)], True),
        ([], [pytest.mark.requires(apex=True)], False),
    ],
)
def test_what_is_for_a_gpu_is_known_by_mark_and_fixture(
    request: pytest.FixtureRequest, fixtures: list[str], marks: list[pytest.MarkDecorator], asks: bool
) -> None:
    """A test that requires CUDA, or takes the device that is there, keeps its GPU."""
    conftest = request.config.pluginmanager.get_plugin(str(request.config.rootpath / "tests" / "conftest.py"))
    item = SimpleNamespace(fixturenames=fixtures, iter_markers=lambda name: [mark.mark for mark in marks])
    assert conftest.may_use_gpu(item) is asks
