"""All guards, by subject. To add one, write a `Detector` with its `Guard` in a file of this folder: it is found there.

The files import torch inside functions, so that the texts of the guards can be listed without it.
"""

import importlib
import pkgutil

from ampcompare.guards.detector import Detector, Guard

__all__ = ["DETECTORS", "GUARDS", "load_checks"]

# By the name of the guard, in the order of files and of classes within a file.
DETECTORS: dict[str, type[Detector]] = {}
GUARDS: dict[str, Guard] = {}


def load_checks() -> None:
    """Import the files of this folder that are not imported yet, and add their guards."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    for detector in Detector.defined:
        DETECTORS[detector.guard.name] = detector
        GUARDS[detector.guard.name] = detector.guard


load_checks()
