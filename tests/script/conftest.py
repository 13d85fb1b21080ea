"""What a script does under an arm, in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.script.behind import Behind, arms


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: bits must match."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def settled_heap() -> None:
    """Let arms, which look for models among all objects, not look at those of other tests: it is most of their time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def behind() -> Iterator[Behind]:
    """Give `arms` to one test."""
    with arms() as behind:
        yield behind


@pytest.fixture
def script_amp(behind: Behind) -> Callable[[str], Any]:
    """Give the `apex.amp` of an arm."""
    return behind.amp
