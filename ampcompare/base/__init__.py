"""What every room stands on: errors, files, child processes, the environment, numbers as text, and tensors."""
