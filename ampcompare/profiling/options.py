"""What to profile, checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ampcompare.base.errors import ConfigError
from ampcompare.settings.config import RunConfig

__all__ = ["ProfileOptions"]


@dataclass(frozen=True)
class ProfileOptions:
    """What to profile, arms with their recipes and the reference first, and how: see `ampcompare.profile`."""

    configs: tuple[RunConfig, ...]
    steps: int = 10
    profiled: int = 3
    trials: bool = True

    @property
    def reference(self) -> RunConfig:
        """What the others are compared with."""
        return self.configs[0]

    def of(self, config: RunConfig) -> ProfileOptions:
        """Return the same for one arm."""
        return replace(self, configs=(config,))

    def check(self) -> None:
        """Refuse what cannot be profiled.

        Raises:
            ConfigError: no steps, several processes of a recipe, or sharded weights.
        """
        for name, value in (("--steps", self.steps), ("--profiled-steps", self.profiled)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        config = self.reference
        if config.script is None and config.processes != 1:
            raise ConfigError(
                f"profile trains a recipe in one process, but {config.processes} were requested; only a script "
                "after -- "
                "may have several"
            )
        if config.recipe.cuda_graph:
            raise ConfigError(
                "profile follows the phases of a step, but --cuda-graph replays it as one piece; leave it out"
            )
