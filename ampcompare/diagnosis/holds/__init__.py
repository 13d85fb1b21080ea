"""Whether a module, a loss or a training step gives under an arm what it gives in fp32: `ampcompare.testing`."""
