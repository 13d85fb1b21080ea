"""Watch a cell for mistakes in the use of amp, in code that is not ours, while no step is timed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ampcompare import guards
from ampcompare.config import RunConfig

__all__ = ["guarded"]


@contextmanager
def guarded(config: RunConfig) -> Iterator[list[str]]:
    """Watch while a cell is put together and makes the updates that are left out of step times.

    After these the guards have gone, so that a timed step runs the functions that it would run without them. Our own
    loop is right by construction; what can be wrong is a model's factory, a data set, or a backend of another package.

    Yields:
        The findings, which fill the list as they come; each is also a line on stderr.

    Raises:
        GuardError: the first finding, where the configuration says "strict".
    """
    found: list[str] = []

    def say(finding: guards.Finding) -> None:
        found.append(str(finding))
        sys.stderr.write(f"ampcompare {finding}\n")

    if config.guards == "off":
        yield found
        return
    passes = config.warmup_steps * config.recipe.grad_accum_steps
    with guards.install(strict=config.guards == "strict", say=say, passes=passes):
        yield found
