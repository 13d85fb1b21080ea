"""Which trainings are ordinary: a closed list of what they may contain, for which a rewrite is known to be right."""
