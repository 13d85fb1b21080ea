"""Asking another process to examine a training: a script by a request in a file, a recipe by a call. Needs no torch."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ParamSpec, Self

from ampcompare.base.environment.torch_names import own_missing_torch_name_error
from ampcompare.base.errors import AmpCompareError, ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.base.option_rules import refusal_sentence
from ampcompare.base.processes.call import ChildAnswer, call_in_child
from ampcompare.settings.config import RunConfig

P = ParamSpec("P")

TIME_LIMIT = 3600.0
ERRORS: dict[int, type[AmpCompareError]] = {2: ConfigError, 4: EnvironmentUnfit}


@dataclass(frozen=True)
class ExaminedScriptRequest:
    """Which script to run under examination; what to see of it is in subclasses.

    `ended` is a file for the exit code of the watched process, or of rank 0.
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


def refuse_several_processes_of_recipe(config: RunConfig, command: str) -> None:
    """Refuse a recipe on several processes, for a command that trains a recipe in one.

    Args:
        config: the settings.
        command: its name, such as "diagnose".

    Raises:
        ConfigError: the settings ask for several, and no script trains.
    """
    if config.processes != 1 and config.script is None:
        raise ConfigError(
            refusal_sentence(
                command,
                f"trains a recipe in one process, but {config.processes} were requested",
                "only a script after -- may have several",
            )
        )


def return_user_errors(examine: Callable[P, dict[str, Any]]) -> Callable[P, dict[str, Any]]:
    """Let a function in a child process return an error meant for users, which `result_of_answer` raises again."""

    @functools.wraps(examine)
    def answer(*args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        try:
            return examine(*args, **kwargs)
        except Exception as raised:
            error = raised if isinstance(raised, AmpCompareError) else own_missing_torch_name_error(raised)
            if error is None:
                raise
            return {"error": str(error), "exit_code": error.exit_code}

    return answer


def result_of_answer(answer: ChildAnswer, error_start: str) -> dict[str, Any]:
    """Return what a function that answers its errors has returned in a child process, or raise its error.

    Args:
        answer: of `call_in_child`.
        error_start: begins the error of a process that died or did not end in time.

    Raises:
        LaunchError: the process has not answered.
        AmpCompareError: the error that it answered, by its exit code.
    """
    if not answer.has_returned:
        raise LaunchError(f"{error_start}: {answer.failure}")
    if "error" in answer.value:
        raise ERRORS.get(answer.value["exit_code"], LaunchError)(answer.value["error"])
    return answer.value


def examine_in_child(
    program: Path,
    config: RunConfig,
    error_start: str,
    options: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    folders: Sequence[Path] = (),
) -> dict[str, Any]:
    """Return what the program of a room finds about a recipe in a process of its own.

    Args:
        program: the file that the process runs, with a function that answers its errors.
        config: what is examined.
        error_start: begins the error of a process that died or did not end in time.
        options: of the function, next to `config`; plain values, since they travel as JSON.
        environment: variables of the process; None for those of this one.
        folders: where it may write, next to what the configuration names.

    Raises:
        LaunchError: the process died, or took too long.
        AmpCompareError: the error with which the function answered, by its exit code.
    """
    answer = call_in_child(
        program,
        seconds=TIME_LIMIT,
        environment=environment,
        shared_paths=config.writable_paths(*folders),
        options={"config": config.model_dump(mode="json"), **options},
    )
    return result_of_answer(answer, error_start)
