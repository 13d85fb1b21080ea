"""The profile of any loop that trains through a precision, in this process."""

from __future__ import annotations

from typing import Any

from ampcompare.base.errors import ConfigError
from ampcompare.profiling.measure import Loop, measure_loop, profile_of
from ampcompare.profiling.step_profiler import Steps
from ampcompare.records.profile import ArmProfile
from ampcompare.settings.config import RunConfig
from ampcompare.training.device import resolve_device

__all__ = ["profile_loop"]


def profile_loop(loop: Loop, config: RunConfig, *, steps: int, profiled: int) -> tuple[ArmProfile, dict[str, Any]]:
    """Train a loop under the arm of a configuration, and return its profile and trace.

    Args:
        loop: gets a precision, calls its `prepare` once, and trains; `step` ends it after the last step.

    Raises:
        ConfigError: it made fewer steps than a profile needs.
        EnvironmentUnfit: this machine lacks the device.
    """
    arm, device = config.parsed_arm, resolve_device(config.device)
    wanted = Steps(timed=steps, profiled=profiled)
    measured, precision, profiler, mode = measure_loop(
        loop, arm, wanted, device, half=config.cpu_half, seed=config.recipe.seed
    )
    if not measured.account.steps:
        raise ConfigError(
            f"the loop made {measured.steps} steps, but a profile needs {wanted.total}: {wanted.warmup} to warm up, "
            f"{wanted.timed} timed, {wanted.profiled} under the profiler, and three that are counted"
        )
    return profile_of(arm, measured, precision.half_dtype, profiler, mode, device), measured.trace
