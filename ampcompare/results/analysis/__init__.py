"""Verdicts from records, without torch. `summary` makes a comparison, `gates` checks one."""
