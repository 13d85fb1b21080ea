"""When a run stops early, goes back, or drops an update: one policy per file, behind one protocol."""
