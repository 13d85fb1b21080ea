"""Rewrite scripts of Apex for `torch.amp`. Needs no torch, except for `--verify`."""
