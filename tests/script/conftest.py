"""What a script does under an arm, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ampcompare.precision.factory import make_precision
from ampcompare.script.amp import ScriptAmp


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: bits must match."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def script_amp() -> Iterator[Callable[[str], ScriptAmp]]:
    """Make the `apex.amp` of an arm, and switch its casts off again."""
    made: list[ScriptAmp] = []

    def make(arm: str) -> ScriptAmp:
        made.append(ScriptAmp(arm, lambda device: make_precision(arm, device=device)))
        return made[-1]

    yield make
    for one in made:
        one.end()
