"""Check a cell for misuse of amp, in code of users and other packages, while no step is timed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ampcompare import guards
from ampcompare.settings.config import RunConfig

__all__ = ["guards_during_warmup"]


@contextmanager
def guards_during_warmup(config: RunConfig) -> Iterator[list[str]]:
    """Install the guards while a cell is built and makes the warmup updates, which step times leave out.

    After these the guards are removed, so that a timed step runs the same functions as without them. ampcompare's own
    loop needs no check; a model's factory, a data set, or a backend of another package does.

    Yields:
        The violations. The list grows as they are found; each is also a line on stderr.

    Raises:
        GuardError: the first violation, if the configuration says "strict".
    """
    violations: list[str] = []

    def report(violation: guards.Violation) -> None:
        violations.append(str(violation))
        sys.stderr.write(f"ampcompare {violation}\n")

    if config.guards == "off":
        yield violations
        return
    passes = config.warmup_steps * config.recipe.grad_accum_steps
    with guards.install(strict=config.guards == "strict", say=report, passes=passes):
        yield violations
