"""Rewrite scripts of Apex for `torch.amp`, or for ampcompare's own contract. Needs no torch, except for `--verify`."""
