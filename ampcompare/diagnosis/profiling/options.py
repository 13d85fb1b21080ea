"""What to profile, checked before torch is imported."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ampcompare.base.errors import AmpCompareError, ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.base.files.run_files import RunFile
from ampcompare.base.processes.call import call_in_child
from ampcompare.runs.records.profile import ArmProfile
from ampcompare.runs.settings.config import RunConfig

__all__ = ["ProfileOptions", "ProfileRequest", "profile_in_child"]

TIME_LIMIT = 3600.0
ERRORS: dict[int, type[AmpCompareError]] = {2: ConfigError, 4: EnvironmentUnfit}


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


@dataclass(frozen=True)
class ProfileRequest:
    """What to run, and how many steps of it to profile.

    Attributes:
        settings: the fields of `ExecSettings`.
        is_module: the script is the name of a module.
        steps, profiled: timed steps, and those under torch.profiler.
        answers: folder for the profile of each rank, and for the trace of rank 0.
        ended: file for the exit code of rank 0, written when it ends.
    """

    settings: dict[str, Any]
    is_module: bool
    steps: int
    profiled: int
    answers: str
    ended: str

    def answer(self, rank: int) -> Path:
        """Return the file for the profile of a rank."""
        return Path(self.answers) / f"profile-{rank}.json"

    @property
    def trace(self) -> Path:
        """The file for the trace of rank 0."""
        return Path(self.answers) / RunFile.TRACE

    def write(self, path: Path) -> None:
        """Write the request for the processes."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ProfileRequest:
        """Return the request of a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


PROGRAM = Path(__file__).resolve().parent / "profile_recipe.py"


def profile_in_child(
    config: RunConfig,
    *,
    steps: int,
    profiled: int,
    trials: bool,
    trace: Path | None = None,
) -> ArmProfile:
    """Profile an arm on a recipe in a separate process.

    Args:
        trace: file for the trace.

    Raises:
        ConfigError: a name, a file or an option that cannot be used.
        EnvironmentUnfit: this machine lacks something that the arm or the data need.
        LaunchError: the model raised, or the process died or did not end in time.
    """
    answer = call_in_child(
        PROGRAM,
        seconds=TIME_LIMIT,
        shared=config.writable_paths(*([] if trace is None else [trace.parent])),
        options={
            "config": config.model_dump(mode="json"),
            "steps": steps,
            "profiled": profiled,
            "trials": trials,
            "trace": "" if trace is None else str(trace),
        },
    )
    if not answer.done:
        raise LaunchError(f"{config.arm} cannot be profiled: {answer.failure}")
    if "error" in answer.value:
        raise ERRORS.get(answer.value["exit_code"], LaunchError)(answer.value["error"])
    return ArmProfile.model_validate(answer.value)
