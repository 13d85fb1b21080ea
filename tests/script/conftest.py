"""What a script does under an arm, in this process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ampcompare.apex._install import install
from ampcompare.backends.arm import Arm
from ampcompare.script.apex_amp import ScriptAmp
from ampcompare.script.stand_in import StandIn
from ampcompare.training.precision.base import make_precision


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
def script_amp() -> Iterator[Callable[[str], ScriptAmp]]:
    """Make the `apex.amp` of an arm, and switch its casts off again."""
    made: list[ScriptAmp] = []

    def make(arm: str) -> ScriptAmp:
        made.append(ScriptAmp(arm, lambda device: make_precision(arm, device=device)))
        return made[-1]

    yield make
    for one in made:
        one.end()


class Behind:
    """Puts arms behind the names of this process."""

    def __init__(self, amp: Any) -> None:
        self._amp = amp
        self._initialize = amp.initialize
        self._made: list[StandIn] = []

    def __call__(self, arm: str, rows: Any = None) -> StandIn:
        self._made.append(StandIn(Arm.parse(arm), rows))
        return self._made[-1]

    def end(self) -> None:
        """Take them away again, as in a new process."""
        for one in self._made:
            one.end()
        self._made.clear()
        self._amp.initialize = self._amp.frontend.initialize = self._initialize
        self._amp._amp_state.close()


@pytest.fixture
def behind() -> Iterator[Behind]:
    """Put arms behind the names of this process, and take them away again."""
    finder, known = install(), set(sys.modules)
    from ampcompare.apex import amp

    behind = Behind(amp)
    yield behind
    behind.end()
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex" and name not in known]:
        del sys.modules[name]
