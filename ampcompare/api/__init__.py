"""The Python interface: each function does what the command of that name does, without the command line.

Importing this package loads no torch; the functions that need it start processes or import it themselves.
"""

from __future__ import annotations

from ampcompare.api.checkpoint import convert_checkpoint
from ampcompare.api.claims import reproduce_claims
from ampcompare.api.comparison import compare
from ampcompare.api.diagnosis import diagnose
from ampcompare.api.explanation import explain_arm
from ampcompare.api.machine import examine_machine
from ampcompare.api.results_table import judge_table
from ampcompare.api.training import run

__all__ = [
    "compare",
    "convert_checkpoint",
    "diagnose",
    "examine_machine",
    "explain_arm",
    "judge_table",
    "reproduce_claims",
    "run",
]
