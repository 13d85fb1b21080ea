"""What a script saves and loads: the trace of each step, the files, and copies that are killed as they save."""
