"""Prepare a process for a script and run the script in it: settings, target, what `import apex` finds, and the run."""
