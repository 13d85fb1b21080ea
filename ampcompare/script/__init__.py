"""Run a user's own training script under any arm: its amp calls lead to the `Precision` of ampcompare's own loop."""
