"""Plans of runs, carried out: matrices, seeds, reuse of records, verification."""
