"""The parts of the engine that Apex does not have: the modules one level up keep Apex's own layout."""
