"""Questions asked in a child process: one per file, each a function of the file's name that returns plain data."""
