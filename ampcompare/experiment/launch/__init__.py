"""Where cells run: each in a separate process, since O1 patches torch for the life of a process."""
