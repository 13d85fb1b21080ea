"""What a run measures: time, memory, communication, summary figures."""
