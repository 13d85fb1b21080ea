"""Loads torchvision, which Lightning's metrics import, also where its compiled operators do not load."""

import importlib.util

from ampcompare.tasks.torchvision_loader import load_torchvision

if importlib.util.find_spec("lightning") is not None:
    load_torchvision()
