"""Clipping by the norm of all gradients, with the name of `apex.contrib.clip_grad`."""

from ampcompare.apex.contrib.clip_grad.clip_grad import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
