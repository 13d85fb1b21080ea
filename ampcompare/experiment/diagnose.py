"""A diagnosis of a recipe, of a loop, or of a user's own script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampcompare.diagnosis.in_child import diagnose_in_child
from ampcompare.diagnosis.options import DiagnoseOptions
from ampcompare.experiment.diagnose_script import diagnose_script
from ampcompare.launch.places import find_places
from ampcompare.report.diagnosis_files import write_diagnosis

if TYPE_CHECKING:
    from ampcompare.diagnosis.measure import Loop
    from ampcompare.records.diagnosis import Diagnosis

__all__ = ["DiagnoseOptions", "diagnose"]


def diagnose(
    options: DiagnoseOptions,
    loop: Loop | None = None,
    *,
    output_dir: Path | None = None,
    say: Callable[[str], Any] = lambda line: None,
) -> Diagnosis:
    """Diagnose a loop in this process, or else the recipe or script of the configuration in separate processes.

    Args:
        output_dir: folder of `diagnosis.json` and, where the extra is installed, `diagnosis.html`; by default none.
        say: called with a line about GPUs that are left out, before each run of a script, and with the files that are
            written.

    Raises:
        ConfigError: options that cannot be used, or no step was watched.
        EnvironmentUnfit: this machine lacks something that was requested.
        LaunchError: training failed.
    """
    found = _diagnose(options, loop, say)
    if output_dir is not None:
        for path in write_diagnosis(found, output_dir):
            say(f"wrote {path}")
    return found


def _diagnose(options: DiagnoseOptions, loop: Loop | None, say: Callable[[str], Any]) -> Diagnosis:
    if loop is not None:
        from ampcompare.diagnosis.diagnose import diagnose_given

        return diagnose_given(loop, options)
    # Of the places that a comparison would have, the first.
    places = find_places([options.config], None, options.gpus)
    for note in places.notes:
        say(note)
    environment = places.all[0].gpu_environment
    if options.config.script is not None:
        return diagnose_script(options, say, environment)
    return diagnose_in_child(options, environment=environment)
