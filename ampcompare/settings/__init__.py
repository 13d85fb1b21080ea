"""Settings: what a run or a comparison is asked to do, where each value comes from, and its checks."""
