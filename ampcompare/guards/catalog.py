"""All guards: every file of `checks` is imported, and each detector in it is a guard. Needs no torch."""

from __future__ import annotations

import importlib
import pkgutil

from ampcompare.guards import checks
from ampcompare.guards.detector import Detector, Guard

__all__ = ["DETECTORS", "GUARDS", "load_checks"]

# By the name of the guard, in the order of files and of classes within a file.
DETECTORS: dict[str, type[Detector]] = {}
GUARDS: dict[str, Guard] = {}


def load_checks() -> None:
    """Import the files of `checks` that are not imported yet, and add their guards."""
    for module in pkgutil.iter_modules(checks.__path__):
        importlib.import_module(f"{checks.__name__}.{module.name}")
    for detector in Detector.defined:
        DETECTORS[detector.guard.name] = detector
        GUARDS[detector.guard.name] = detector.guard


load_checks()
