"""Verdicts from records, without torch: comparability, statistics, summaries, gates."""
