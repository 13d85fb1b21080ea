"""Networks of the benchmark, and small loops."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def planted() -> Iterator[ModuleType]:
    """The module with the planted faults."""
    specification = importlib.util.spec_from_file_location("faults", BENCHMARKS / "faults.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["faults"] = module
    specification.loader.exec_module(module)
    yield module
    del sys.modules["faults"]
