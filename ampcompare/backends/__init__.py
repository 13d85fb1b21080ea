"""The backends as data, without torch: arms, options, requirements."""
