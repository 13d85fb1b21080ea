"""How often verdicts are wrong: studies by simulation, and of an arm against itself in real runs."""
