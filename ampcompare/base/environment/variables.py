"""The names of ampcompare's own environment variables, next to those of the options (`cli/help.py: variable_name`)."""

import os

# What a user may write for true and false: in a variable, an option or an arm.
TRUE_WORDS = ("true", "1", "yes", "on")
FALSE_WORDS = ("false", "0", "no", "off")

APEX_STRICT = "AMPCOMPARE_APEX_STRICT"  # a user's: brings the defects of Apex back into the engine
CELL_FOLDER = "AMPCOMPARE_CELL_DIR"  # where a script's cell writes its record
CODE_FOLDER = "AMPCOMPARE_CODE_FOLDER"  # what the paths of a script's code are relative to
MASK = "AMPCOMPARE_MASK"  # further names of secrets
PLACE = "AMPCOMPARE_PLACE"  # the share of the machine that a cell has
SANDBOX = "AMPCOMPARE_SANDBOX"  # what a process sees of the files, as JSON
STARTED_BY = "AMPCOMPARE_STARTED_BY"  # what started the ranks
OTHER_VARIABLES = (APEX_STRICT, CELL_FOLDER, CODE_FOLDER, MASK, PLACE, SANDBOX, STARTED_BY)


def reproduces_apex_defects() -> bool:
    """Return whether the environment brings the defects of Apex back: the variable is 1, true, yes or on."""
    return os.environ.get(APEX_STRICT, "").strip().lower() in TRUE_WORDS
