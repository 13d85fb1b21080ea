"""What the source of a user's script says about the arms that can train it, before any of them runs."""
