"""Which trainings are ordinary: a list of what they may contain, where nothing in the text speaks against a rewrite."""
