"""Training programs for claims that the training loop does not support on purpose."""
