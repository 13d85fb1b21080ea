"""Rewrite the core of `apex.amp`: initialize, scale_loss, gradients that are read, steps, and state."""
