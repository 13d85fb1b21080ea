"""A comparison in, text out: one file per format. Nothing here imports torch."""
