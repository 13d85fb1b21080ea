"""Arms behind the names of this process."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ampcompare.apex._install import install
from ampcompare.backends.arm import Arm
from ampcompare.base.tensors.cuda_casts import cuda_casts
from ampcompare.script.behind.stand_in import ArmStandIn


class Behind:
    """Puts arms behind the names of this process."""

    def __init__(self, amp: Any) -> None:
        self._amp = amp
        self._initialize = amp.initialize
        self._made: list[ArmStandIn] = []

    def __call__(self, arm: str, rows: Any = None) -> ArmStandIn:
        self._made.append(ArmStandIn(Arm.parse(arm), rows))
        return self._made[-1]

    def amp(self, arm: str) -> Any:
        """Return the `apex.amp` of an arm."""
        self(arm)
        return self._amp

    def end(self) -> None:
        """Take them away again, as in a new process."""
        for one in self._made:
            one.end()
        self._made.clear()
        self._amp.initialize = self._amp.frontend.initialize = self._initialize
        self._amp._amp_state.close()


@contextmanager
def arms() -> Iterator[Behind]:
    """Put arms behind the names of this process, and take them away again."""
    finder, known = install(), set(sys.modules)
    from ampcompare.apex import amp

    behind = Behind(amp)
    with cuda_casts(everywhere=True):  # as in the process of a script
        yield behind
        behind.end()
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "apex" and name not in known]:
        del sys.modules[name]
