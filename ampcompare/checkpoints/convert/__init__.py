"""Converts checkpoints between Apex and torch.amp, and between arms."""
