"""Training programs that claims need and that the one training loop must not have."""
