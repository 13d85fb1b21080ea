"""How numbers are stored and gradients are kept finite: one file per backend, behind one contract."""
