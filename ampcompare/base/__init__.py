"""What every room stands on: errors, files, child processes, the environment, and numbers as text."""
