"""One step of a script: kept in a file, and repeated module by module."""
