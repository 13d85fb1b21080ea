"""What a module does, read from its tree: its names, its uses of Apex, the order of calls, forward passes, findings."""
