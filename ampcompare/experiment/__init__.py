"""Execute plans of runs: matrices, seeds, reuse of records, verification; `launch` starts their processes."""
