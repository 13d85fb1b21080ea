"""The four stages of a cell, in their order: configure the process, build, run, record. `cell.py` calls them."""
