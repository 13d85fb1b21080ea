"""Learning rate schedulers built with `verbose`, which torch has removed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

from torch.optim import lr_scheduler

from ampcompare.script.legacy.stderr import note

__all__ = ["patch"]


def patch() -> None:
    """Let torch's schedulers accept and ignore `verbose` if they no longer have it."""
    for kind in _schedulers():
        if "__init__" in vars(kind) and "verbose" not in inspect.signature(kind.__init__).parameters:
            _accept_verbose(kind)


def _schedulers() -> Iterable[type[Any]]:
    kinds = [lr_scheduler.LRScheduler]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return dict.fromkeys(kinds)


def _accept_verbose(kind: Any) -> None:
    init = kind.__init__
    count = len(inspect.signature(init).parameters)

    @functools.wraps(init)
    def init_without_verbose(self: Any, *args: Any, **kwargs: Any) -> None:
        # It was the last positional parameter, after those that remain.
        beyond = len(args) + 1 > count and isinstance(args[-1], (bool, str))
        if beyond or "verbose" in kwargs:
            args = args[:-1] if beyond else args
            kwargs.pop("verbose", None)
            note("verbose of a learning rate scheduler was removed and is ignored")
        init(self, *args, **kwargs)

    kind.__init__ = init_without_verbose
