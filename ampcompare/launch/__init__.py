"""Where cells run: each in a process of its own, since O1 patches torch for the life of a process."""
