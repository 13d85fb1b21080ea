"""Execute plans of runs: matrices, seeds, reuse of records, verification."""
