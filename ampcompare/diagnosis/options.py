"""What to diagnose, checked before torch is imported, and asking a process to do it. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ampcompare.base.errors import AmpCompareError, ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.base.processes.call import call_in_child
from ampcompare.runs.records.diagnosis import Diagnosis
from ampcompare.runs.settings.config import RunConfig

__all__ = ["DiagnoseOptions", "PrefixRequest", "Request", "diagnose_in_child"]

TIME_LIMIT = 3600.0
PROGRAM = Path(__file__).resolve().parent / "diagnose_recipe.py"
ERRORS: dict[int, type[AmpCompareError]] = {2: ConfigError, 4: EnvironmentUnfit}


@dataclass(frozen=True)
class DiagnoseOptions:
    """What to diagnose, an arm and recipe, and how: the fields are described at `ampcompare.diagnose`."""

    config: RunConfig
    steps: int = 8
    at: tuple[int, ...] = ()
    reference: Literal["float32", "float64", "none"] = "float32"
    cures: bool = True
    rank: int = 0
    gpus: str | None = None

    def check(self) -> None:
        """Refuse what cannot be diagnosed.

        Raises:
            ConfigError: operations that cannot be seen one by one, several processes, or steps that are never made.
        """
        recipe = self.config.recipe
        if recipe.compile != "none" or recipe.cuda_graph:
            name = "--cuda-graph" if recipe.cuda_graph else "--compile"
            raise ConfigError(f"diagnose watches operations one by one, but {name} fuses them; leave it out")
        if self.config.processes != 1 and self.config.script is None:
            raise ConfigError(
                f"diagnose trains a recipe in one process, but {self.config.processes} were requested; only a script "
                f"after -- may have several"
            )
        if not self.rank < self.config.processes:
            raise ConfigError(
                f"--rank {self.rank} does not exist; the ranks of this run are 0 to {self.config.processes - 1}"
            )
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, not {self.steps}")
        late = [step for step in self.at if not 0 <= step < self.steps]
        if late:
            raise ConfigError(f"step {late[0]} is beyond the steps that are run, 0 to {self.steps - 1}; raise --steps")


@dataclass(frozen=True)
class Request:
    """What to run, and what to see of it.

    Attributes:
        settings: the fields of `ExecSettings`.
        is_module: the script is the name of a module.
        lines: file:line of calls that run in fp32.
        rank: the process that is watched; the others only stop with it.
        answer: file for the diagnosis and the names of functions in fp32.
        ended: file for the exit code of the watched process, written when it ends.
    """

    settings: dict[str, Any]
    is_module: bool
    steps: int
    at: list[int]
    reference: str
    lines: list[str]
    rank: int
    answer: str
    ended: str

    def write(self, path: Path) -> None:
        """Write the request for a process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Request:
        """Return the request of a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class PrefixRequest:
    """Which first steps of a script to watch.

    Attributes:
        settings: the fields of `ExecSettings`.
        is_module: the script is the name of a module.
        steps: of the prefix.
        total: optimizer steps of the whole training; None if only its scheduler knows.
        answer: file for what was seen.
        ended: file for the exit code of rank 0, written when it ends.
    """

    settings: dict[str, Any]
    is_module: bool
    steps: int
    total: int | None
    answer: str
    ended: str

    def write(self, path: Path) -> None:
        """Write the request for a process."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> PrefixRequest:
        """Return the request of a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def diagnose_in_child(options: DiagnoseOptions, *, environment: Mapping[str, str] | None = None) -> Diagnosis:
    """Diagnose a recipe in a separate process.

    Args:
        environment: variables that the process gets in addition.

    Raises:
        ConfigError: a name, a file or an option that cannot be used.
        EnvironmentUnfit: this machine lacks something that the arm or the data need.
        LaunchError: the model raised, or the process died or did not end in time.
    """
    options.check()
    answer = call_in_child(
        PROGRAM,
        seconds=TIME_LIMIT,
        environment=environment,
        shared=options.config.writable_paths(),
        options={
            "config": options.config.model_dump(mode="json"),
            "steps": options.steps,
            "at": list(options.at),
            "reference": options.reference,
            "cures": options.cures,
        },
    )
    if not answer.done:
        raise LaunchError(f"{options.config.arm} cannot be diagnosed: {answer.failure}")
    if "error" in answer.value:
        raise ERRORS.get(answer.value["exit_code"], LaunchError)(answer.value["error"])
    return Diagnosis.model_validate(answer.value)
