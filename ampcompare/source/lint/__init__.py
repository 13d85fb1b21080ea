"""Lint: mistakes in the use of Apex and `torch.amp`, found in source without running it. Needs no torch."""
