"""Cells that train a user's own script: each is a process of `ampcompare exec` with a record of its steps."""
