"""What to profile, checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ampcompare.base.errors import ConfigError
from ampcompare.base.files.run_files import RunFile
from ampcompare.base.option_rules import refusal_sentence
from ampcompare.results.records.profile import ArmProfile
from ampcompare.settings.config import RunConfig
from ampcompare.settings.examination import (
    ExaminedScriptRequest,
    examine_in_child,
    refuse_several_processes_of_recipe,
)

PROGRAM = Path(__file__).resolve().parent / "profile_recipe.py"


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

    def check(self) -> None:
        """Refuse what cannot be profiled.

        Raises:
            ConfigError: names what does not act together, or a number of steps below 1.
        """
        if not self.configs:
            raise ConfigError("profile needs at least one arm; name one with --arm")
        for name, value in (("--steps", self.steps), ("--profiled-steps", self.profiled)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        config = self.reference
        refuse_several_processes_of_recipe(config, "profile")
        if config.recipe.cuda_graph:
            raise ConfigError(
                refusal_sentence(
                    "--cuda-graph", "is not for profile, which follows the phases of a step", "leave it out"
                )
            )


@dataclass(frozen=True)
class ProfileRequest(ExaminedScriptRequest):
    """How many steps to profile."""

    steps: int
    profiled: int
    answers: str  # folder for the profile of each rank, and for the trace of rank 0

    def answer_path_of_rank(self, rank: int) -> Path:
        return Path(self.answers) / f"profile-{rank}.json"

    @property
    def trace_path(self) -> Path:
        return Path(self.answers) / RunFile.TRACE


def profile_in_child(config: RunConfig, options: ProfileOptions, trace: Path) -> ArmProfile:
    """Profile an arm on a recipe in a separate process, which writes its trace.

    Args:
        config: of the arm.
        options: how many steps to time and to profile; its own configurations are not used.
        trace: the file, which the child overwrites.

    Raises:
        LaunchError: the process died, or took too long.
        AmpCompareError: what the training raised.
    """
    asked = {
        "steps": options.steps,
        "profiled": options.profiled,
        "trials": options.trials,
        "trace": str(trace),
    }
    failed = f"{config.arm} cannot be profiled"
    return ArmProfile.model_validate(examine_in_child(PROGRAM, config, failed, asked, folders=[trace.parent]))
