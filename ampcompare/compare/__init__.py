"""The matrix of arms and seeds: planned, run cell by cell, summed up."""
