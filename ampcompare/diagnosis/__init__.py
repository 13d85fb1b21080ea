"""What an arm does inside a training step: explained in advance, or diagnosed where numbers overflow or are lost."""
