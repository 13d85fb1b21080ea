"""What to diagnose, checked before torch is imported, and asking a process to do it. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError, require_one_of
from ampcompare.results.records.diagnosis import Diagnosis
from ampcompare.settings.config import RunConfig
from ampcompare.settings.examination import (
    ExaminedScriptRequest,
    examine_in_child,
    refuse_several_processes_of_recipe,
)

PROGRAM = Path(__file__).resolve().parent / "diagnose_recipe.py"
Reference = Literal["float32", "float64", "none"]
MIN_PREFIX = 10  # steps: the law of lost updates needs no more


@dataclass(frozen=True)
class DiagnoseOptions:
    """What to diagnose, an arm and recipe, and how: the fields are described at `ampcompare.diagnose`."""

    config: RunConfig
    steps: int = 8
    reference: Reference = "float32"
    cures: bool = True

    def check(self) -> None:
        """Refuse what cannot be diagnosed.

        Raises:
            ConfigError: names what does not act together, or a number of steps below 1.
        """
        recipe = self.config.recipe
        if recipe.compile != "none" or recipe.cuda_graph:
            name = "--cuda-graph" if recipe.cuda_graph else "--compile"
            raise ConfigError(f"diagnose watches operations one by one, but {name} fuses them; leave it out")
        refuse_several_processes_of_recipe(self.config, "diagnose")
        roles = self.config.parsed_arm.roles
        if self.config.script is not None and roles is not None and roles.linear_formats:
            raise ConfigError(
                f"{self.config.arm} is diagnosed by running a training once for each product of each layer, too long "
                f"for a script; diagnose a recipe or a loop, or read the ledger of the script"
            )
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, not {self.steps}")
        require_one_of(get_args(Reference), "reference", self.reference)


@dataclass(frozen=True)
class AheadOptions:
    """Which training to look at, and for which arms.

    Attributes:
        config: of the training; its arm is not used.
        prefix: steps that are run.
        steps: optimizer steps of the whole training; None: its scheduler or recipe says, or the rate stays.
        twin: run the prefix again from weights changed by one part in 512.
    """

    config: RunConfig
    arms: Sequence[Arm]
    prefix: int = 100
    steps: int | None = None
    twin: bool = True

    def check(self) -> None:
        """Refuse what cannot be looked at.

        Raises:
            ConfigError: there is no arm, a prefix is too short, or the whole training is not longer than it.
        """
        if not self.arms:
            raise ConfigError("there is no arm to look at; give some, as in --arm half:bf16,O2")
        if self.prefix < MIN_PREFIX:
            raise ConfigError(f"a prefix of {self.prefix} steps is too short; give at least {MIN_PREFIX}")
        if self.steps is not None and self.steps <= self.prefix:
            raise ConfigError(
                f"--steps {self.steps} is the length of the whole training, but the prefix alone has {self.prefix} "
                "steps; give a larger number, or a shorter --prefix"
            )


@dataclass(frozen=True)
class StepWatchRequest(ExaminedScriptRequest):
    """What to see of some steps."""

    steps: int
    reference: str
    lines: list[str]  # file:line of calls that run in fp32
    answer: str  # file for the diagnosis and the names of functions in fp32


@dataclass(frozen=True)
class PrefixWatchRequest(ExaminedScriptRequest):
    """Which first steps to watch."""

    steps: int
    total: int | None  # optimizer steps of the whole training; None if only its scheduler knows
    answer: str  # file for what was seen


def diagnose_in_child(options: DiagnoseOptions, *, environment: Mapping[str, str] | None = None) -> Diagnosis:
    """Diagnose an arm on a recipe in a separate process.

    Args:
        options: the arm and its recipe, and what to look for.
        environment: variables of the process; None for those of this one.

    Raises:
        ConfigError: options that cannot be used together.
        LaunchError: the process died, or took too long.
        AmpCompareError: what the training raised.
    """
    options.check()
    asked = {name: getattr(options, name) for name in ("steps", "reference", "cures")}
    what = f"{options.config.arm} cannot be diagnosed"
    return Diagnosis.model_validate(
        examine_in_child(PROGRAM, options.config, what, asked, environment=environment)
    )
