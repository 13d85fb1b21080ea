"""From settings to the policies of a run, in the order in which they are applied."""

from __future__ import annotations

from ampcompare.settings.config import RunConfig
from ampcompare.training.assemble import Assembly
from ampcompare.training.policies.divergence import DivergenceDetector
from ampcompare.training.policies.early_stop import EarlyStop
from ampcompare.training.policies.policy import Policy
from ampcompare.training.policies.rollback import Rollback
from ampcompare.training.policies.scale_limits import ScaleLimits
from ampcompare.training.policies.skip_nonfinite import SkipNonFinite

__all__ = ["make_policies"]


def make_policies(config: RunConfig, assembly: Assembly, divergence: DivergenceDetector) -> list[Policy]:
    """Return the policies that a configuration asks for; each applies its rule to what those before it left.

    Args:
        divergence: finds divergence first; a limit may add to it, and a rollback may clear it.
    """
    optional = (
        EarlyStop.from_config(config, assembly.task.metrics[0]),
        ScaleLimits.from_config(config, divergence),
        Rollback.from_config(config, assembly, divergence),
        SkipNonFinite.from_config(config, assembly),
    )
    return [divergence, *(policy for policy in optional if policy is not None)]
