"""What to diagnose, checked before torch is imported, and asking a process to do it. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from ampcompare.base.errors import AmpCompareError, ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.base.processes.call import call_in_child
from ampcompare.runs.records.diagnosis import Diagnosis
from ampcompare.runs.settings.config import RunConfig

__all__ = [
    "ERRORS",
    "DiagnoseOptions",
    "PrefixRequest",
    "Request",
    "ScriptRequest",
    "diagnose_in_child",
    "examine_in_child",
]

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
class ScriptRequest:
    """Which script to run under examination; what to see of it is in subclasses.

    Attributes:
        settings: the fields of `ExecSettings`.
        is_module: the script is the name of a module.
        ended: file for the exit code of the watched process, or of rank 0, written when it ends.
    """

    settings: dict[str, Any]
    is_module: bool
    ended: str

    def write(self, path: Path) -> None:
        """Write the request for the processes."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the request of a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Request(ScriptRequest):
    """What to see of some steps.

    Attributes:
        lines: file:line of calls that run in fp32.
        rank: the process that is watched; the others only stop with it.
        answer: file for the diagnosis and the names of functions in fp32.
    """

    steps: int
    at: list[int]
    reference: str
    lines: list[str]
    rank: int
    answer: str


@dataclass(frozen=True)
class PrefixRequest(ScriptRequest):
    """Which first steps to watch.

    Attributes:
        steps: of the prefix.
        total: optimizer steps of the whole training; None if only its scheduler knows.
        answer: file for what was seen.
    """

    steps: int
    total: int | None
    answer: str


def diagnose_in_child(options: DiagnoseOptions, *, environment: Mapping[str, str] | None = None) -> Diagnosis:
    """Diagnose a recipe in a separate process.

    Args:
        environment: variables that the process gets in addition.

    Raises:
        ConfigError, EnvironmentUnfit, LaunchError: as `examine_in_child`.
    """
    options.check()
    asked = {name: getattr(options, name) for name in ("steps", "reference", "cures")} | {"at": list(options.at)}
    what = f"{options.config.arm} cannot be diagnosed"
    return Diagnosis.model_validate(examine_in_child(PROGRAM, options.config, what, asked, environment=environment))


def examine_in_child(
    program: Path,
    config: RunConfig,
    failed: str,
    options: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    folders: Sequence[Path] = (),
) -> Any:
    """Return what a program of this room finds about a recipe in a process of its own.

    Args:
        failed: first words of the error if the process fails.
        options: of its function, next to `config`.
        environment: variables that the process gets in addition.
        folders: where it writes.

    Raises:
        ConfigError: a name, a file or an option that cannot be used.
        EnvironmentUnfit: this machine lacks something that the arm or the data need.
        LaunchError: the model raised, or the process died or did not end in time.
    """
    answer = call_in_child(
        program,
        seconds=TIME_LIMIT,
        environment=environment,
        shared=config.writable_paths(*folders),
        options={"config": config.model_dump(mode="json"), **options},
    )
    if not answer.done:
        raise LaunchError(f"{failed}: {answer.failure}")
    if "error" in answer.value:
        raise ERRORS.get(answer.value["exit_code"], LaunchError)(answer.value["error"])
    return answer.value
