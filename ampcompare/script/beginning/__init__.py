"""What the training of a script begins with: its seeds and its first weights."""
