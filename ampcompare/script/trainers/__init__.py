"""Libraries that train for a script: what of their own precision an arm replaces, and what it cannot replace."""
