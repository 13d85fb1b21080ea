"""The one training loop, what it is assembled from, and what it measures.

`precision` holds the backends as they train, `parallel` several processes, `checkpoint` the files.
"""
