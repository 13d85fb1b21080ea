"""The record of a cell that an exception ended."""

from __future__ import annotations

import errno

import torch

from ampcompare.base.environment.fingerprint import fingerprint, host_name
from ampcompare.base.errors import AmpCompareError, EnvironmentUnfit
from ampcompare.runs.records.run import RunRecord
from ampcompare.runs.settings.config import RunConfig

__all__ = ["failed_with"]

ARM_FAILED = 3


def failed_with(config: RunConfig, error: Exception, process: str = "") -> RunRecord:
    """Return the record of a cell that an exception ended, with the exit code of the command.

    Args:
        process: the one that raised it, if there are several.
    """
    exit_code = ARM_FAILED
    if isinstance(error, AmpCompareError):  # these errors carry their own exit code
        text, exit_code = str(error), error.exit_code
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        file = "" if error.filename is None else f" for {error.filename}"
        text = f"no space is left on the disk{file}; free some or choose another --output-dir"
        exit_code = EnvironmentUnfit.exit_code
    else:
        kind = "out of memory" if _is_out_of_memory(error) else type(error).__name__
        text = ": ".join(filter(None, [process, kind, _first_line(error)]))
    environment = {**fingerprint(), "exit_code": exit_code}
    return RunRecord(
        cell=config.digest(),
        arm=config.arm,
        status="failed",
        config=config,
        host=host_name(),
        environment=environment,
        error=text,
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out. torch raises its own class for GPUs, and a plain RuntimeError for CPUs."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
