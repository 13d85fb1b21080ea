"""All guards, by subject. To add one, write a `Detector` with its `Guard` in a file of this folder: it is found there.

The files import torch inside functions, so that the texts of the guards can be listed without it.
"""

import importlib
import pkgutil

from ampcompare.guards.detection.detector import Detector

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
# By the name of the guard, in the order of files and of classes within a file.
DETECTORS = {detector.guard.name: detector for detector in Detector.defined}
GUARDS = {name: detector.guard for name, detector in DETECTORS.items()}
