"""What every test needs: one thread, no settings of the user, this checkout in child processes, and `requires`."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A runner started in the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Before anything imports torch, which reads the thread count once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
for variable in [name for name in os.environ if name.startswith("AMPCOMPARE_")]:
    del os.environ[variable]
# Child processes started in another folder must import this checkout too, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _missing(cuda: int = 0, apex: bool = False) -> str | None:
    """Say what this machine lacks of what a test requires, or None.

    Args:
        cuda: number of CUDA devices.
        apex: the real Apex with `apex.amp`; looked for by files, because importing it may fail.
    """
    if cuda:
        import torch

        found = torch.cuda.device_count()
        if found < cuda:
            return f"needs {cuda} CUDA device(s), {found} found"
    if apex:
        spec = importlib.util.find_spec("apex")
        folders = (spec.submodule_search_locations if spec else None) or []
        if not any(Path(folder, "amp", "__init__.py").is_file() for folder in folders):
            return "needs the real Apex with apex.amp (last in tag 25.05)"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose mark `requires` names what is not here."""
    for mark in item.iter_markers("requires"):
        reason = _missing(*mark.args, **mark.kwargs)
        if reason is not None:
            pytest.skip(reason)
