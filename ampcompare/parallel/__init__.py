"""How replicas of a model work together: one file per kind, behind one contract."""
