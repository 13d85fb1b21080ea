"""What rules read of a script: its traces of training events, and which of its calls are outside of autocast."""
