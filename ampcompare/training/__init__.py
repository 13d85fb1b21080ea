"""The one training loop, what it is assembled from, and what it measures."""
