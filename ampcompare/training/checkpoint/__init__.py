"""Saving a run at a drain point and resuming it bit for bit."""
