"""Verdicts from records, without torch. `summary` makes a comparison, `forest` joins several, `gates` checks one."""
