"""Decide which lines are wrong: rules by subject; each file is imported, and each function with `@rule` in it is one."""
