"""Examine this machine and its libraries: the command `doctor`."""

from collections.abc import Sequence
from pathlib import Path

from ampcompare.backends.arm import Arm, parse_arms
from ampcompare.base.processes.call import TIME_LIMIT
from ampcompare.doctor.examine import Examination, examine


def examine_machine(
    arms: Sequence[Arm | str] = (), *, scripts: Sequence[str | Path] = (), time_limit: float = TIME_LIMIT
) -> Examination:
    """Examine this machine and its libraries, each in a separate process.

    Args:
        arms: arms such as "apex:O1,engine=nvidia" to check one by one.
        scripts: files and folders of which it is said what their imports of Apex get; by default the Python files of
            the current folder.
        time_limit: time limit for each import, in seconds.

    Returns:
        All checks with their verdicts; `data()` is the JSON document of the command `doctor`.

    Raises:
        ConfigError: there is no such arm.
    """
    parsed = [one for arm in arms for one in (parse_arms([arm]) if isinstance(arm, str) else [arm])]
    return examine(parsed, [Path(script) for script in scripts], seconds=time_limit)
