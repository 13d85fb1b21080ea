"""The environment variables with which each process starts that runs a user's script to be compared with other runs."""

import os

from ampcompare.base.environment.fingerprint import THREAD_VARIABLES

ONE_THREAD = {**dict.fromkeys(THREAD_VARIABLES, "1"), "PYTHONHASHSEED": "0"}
"""Of a process whose steps are compared with those of another one to the last bit, whatever the user has set."""


EXAMINING = {"PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
"""Of a process in which each operation of a script is looked at: compiled code shows none. Torch warns of the watch."""


def script_environment(threads: int | None = None) -> dict[str, str]:
    """Return the variables of this process, and what makes runs of a script alike, as far as the user sets none.

    Strings hash alike in all runs: a script may number its classes by a set of names.

    Args:
        threads: of each pool; None where the script's own number is the same in all runs.
    """
    own = {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))
    hashing = os.environ.get("PYTHONHASHSEED") or "random"
    return {**own, **os.environ, "PYTHONHASHSEED": "0" if hashing == "random" else hashing}
