"""Assertions for the test suites of other projects: a module, a loss or a training step holds under given arms."""

from __future__ import annotations

from ampcompare.testing.holds import DEFAULT_ARMS, DoesNotHold, Figure, Held, holds

__all__ = ["DEFAULT_ARMS", "DoesNotHold", "Figure", "Held", "holds"]
