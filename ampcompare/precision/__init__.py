"""How numbers are stored and gradients kept finite: one file per backend, behind one contract."""
