"""A diagnosis of a recipe in a process of its own, and the files that it leaves. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ampcompare.errors import AmpCompareError, ConfigError, EnvironmentUnfit, LaunchError
from ampcompare.files.write import write_atomically
from ampcompare.isolate.call import call_in_child
from ampcompare.records.diagnosis import Diagnosis
from ampcompare.records.run import dump_json
from ampcompare.report.formats import FORMATS
from ampcompare.settings.config import RunConfig

__all__ = ["DiagnoseOptions", "diagnose_in_child", "write_diagnosis"]

TIME_LIMIT = 3600.0
PROGRAM = Path(__file__).resolve().parent / "diagnose_recipe.py"
ERRORS: dict[int, type[AmpCompareError]] = {2: ConfigError, 4: EnvironmentUnfit}


@dataclass(frozen=True)
class DiagnoseOptions:
    """What to diagnose and how.

    Attributes:
        config: arm and recipe.
        steps: updates of each run.
        at: steps to watch; empty for all.
        reference: type of the run alongside; "none" watches ranges alone.
        cures: test candidates of a cure.
    """

    config: RunConfig
    steps: int = 8
    at: tuple[int, ...] = ()
    reference: Literal["float32", "float64", "none"] = "float32"
    cures: bool = True

    def check(self) -> None:
        """Refuse what cannot be diagnosed.

        Raises:
            ConfigError: operations that cannot be seen one by one, several processes, or steps that are never made.
        """
        recipe = self.config.recipe
        if recipe.compile != "none" or recipe.cuda_graph:
            name = "--cuda-graph" if recipe.cuda_graph else "--compile"
            raise ConfigError(f"diagnose watches operations one by one, and {name} joins them; leave it out")
        if self.config.processes != 1:
            raise ConfigError(f"diagnose trains in one process, and {self.config.processes} were asked for")
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, not {self.steps}")
        late = [step for step in self.at if not 0 <= step < self.steps]
        if late:
            raise ConfigError(f"step {late[0]} is to be watched, and steps 0 to {self.steps - 1} are made; raise --steps")


def diagnose_in_child(options: DiagnoseOptions, *, seconds: float = TIME_LIMIT) -> Diagnosis:
    """Diagnose a recipe in a process of its own.

    Raises:
        ConfigError: a name, a file or an option that cannot be used.
        EnvironmentUnfit: this machine lacks something that the arm or the data need.
        LaunchError: the model raised, or the process died or did not end in time.
    """
    options.check()
    answer = call_in_child(
        PROGRAM,
        seconds=seconds,
        options={
            "config": options.config.model_dump(mode="json"),
            "steps": options.steps,
            "at": list(options.at) or None,
            "reference": None if options.reference == "none" else options.reference,
            "cures": options.cures,
        },
    )
    if not answer.done:
        raise LaunchError(f"{options.config.arm} cannot be diagnosed: {answer.failure}")
    if "error" in answer.value:
        raise ERRORS.get(answer.value["exit_code"], LaunchError)(answer.value["error"])
    return Diagnosis.model_validate(answer.value)


def write_diagnosis(diagnosis: Diagnosis, folder: Path) -> list[Path]:
    """Write `diagnosis.json`, and `diagnosis.html` where the extra for it is installed; return the files.

    Raises:
        EnvironmentUnfit: the folder cannot be written.
    """
    written = [folder / "diagnosis.json"]
    write_atomically(written[0], dump_json(diagnosis) + "\n")
    if not FORMATS["html"].missing:
        from ampcompare.report.html.diagnosis_page import diagnosis_page

        written.append(folder / "diagnosis.html")
        write_atomically(written[1], diagnosis_page(diagnosis))
    return written
