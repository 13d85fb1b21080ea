"""The settings of runs and comparisons: their fields, where each value comes from, and their checks."""
