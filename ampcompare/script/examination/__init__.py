"""Runs of a script that are looked at instead of recorded: child processes, each with one request."""
