"""Decide which lines are wrong: rules by subject; each function with `@rule` in a file is one."""
