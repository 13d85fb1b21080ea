"""Stands for a compiled module of Apex."""
