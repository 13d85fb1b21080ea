"""Loads torchvision, which Lightning's metrics import, also where its compiled operators do not load."""

from ampcompare.tasks.torchvision_loader import load_torchvision

load_torchvision()
