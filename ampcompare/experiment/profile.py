"""Profiles of several arms on a recipe, of a loop, or of a user's own script, side by side."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampcompare.base.environment.extras import require_torch
from ampcompare.base.errors import AmpCompareError
from ampcompare.base.files.run_files import RunFile
from ampcompare.base.files.write import write_atomically
from ampcompare.diagnosis.profiling.options import ProfileOptions, ProfileRequest, profile_in_child
from ampcompare.diagnosis.profiling.reasons import headline_of_profiles, profiles_with_reasons
from ampcompare.diagnosis.profiling.trace import trace_of_all_arms
from ampcompare.experiment.diagnose import (
    ENDED,
    exec_settings_for_watching,
    run_examined_script,
    say_writable_files,
)
from ampcompare.results.records.profile import ArmProfile, Profile
from ampcompare.results.report.base import write_result_in_formats
from ampcompare.settings.config import RunConfig

if TYPE_CHECKING:
    from ampcompare.diagnosis.profiling.measure import Loop

SCRIPT_NOTE = "in a script torch.compile is off, and switches that may help are not trained"
Say = Callable[[str], Any]


def profile(
    options: ProfileOptions,
    loop: Loop | None = None,
    *,
    output_dir: Path | None = None,
    say: Say = lambda line: None,
) -> Profile:
    """Profile each arm: a loop in this process, or else the recipe or script of the configurations, each in its own.

    Args:
        options: the arms, whose first one is the reference, and how many steps.
        loop: gets the precision and trains a few steps in this process; None for what the configurations name.
        output_dir: folder of `profile.json`, `profile.md`, `trace.json` and, where the extra is installed,
            `profile.html`; by default none.
        say: called with a line before each arm, and with the files that are written.

    Raises:
        ConfigError: options that cannot be used together.
        ExtraMissing: torch is not installed, or too old.
        LaunchError: the reference could not be trained; another arm that cannot is a profile with its failure.
    """
    options.check()
    require_torch()
    arms: list[ArmProfile] = []
    traces: list[tuple[str, Mapping[str, Any]]] = []
    if options.configs[0].script is not None:
        say_writable_files(say)
    for config in options.configs:
        say(f"profiling {config.arm}")
        try:
            found, trace = _measure_profile_and_trace(options, config, loop)
        except AmpCompareError as error:
            if not arms:
                raise
            found, trace = ArmProfile(arm=config.arm, failure=str(error)), {}
        arms.append(found)
        traces.append((config.arm, trace))
    config, profiles = options.reference, profiles_with_reasons(arms)
    recipe = config.recipe
    subject = f"{recipe.model.arch} on {recipe.data.name}, batch {recipe.batch_size}, {recipe.optimizer.name}"
    if config.script is not None:
        subject = config.script.name
    result = Profile(
        reference=config.arm,
        headline=headline_of_profiles(profiles),
        arms=profiles,
        subject=subject if loop is None else "",
        device=profiles[0].device,
        notes=[
            *([SCRIPT_NOTE] if config.script is not None else []),
            *dict.fromkeys(note for arm in profiles for note in arm.notes),
        ],
    )
    if output_dir is not None:
        written = write_result_in_formats(result, output_dir, ("json", "md", "html"))
        merged = trace_of_all_arms(traces)
        if merged["traceEvents"]:
            written = [*written, output_dir / RunFile.TRACE]
            write_atomically(written[-1], json.dumps(merged) + "\n")
        for path in written:
            say(f"wrote {path}")
    return result


def _measure_profile_and_trace(
    options: ProfileOptions, config: RunConfig, loop: Loop | None
) -> tuple[ArmProfile, Mapping[str, Any]]:
    if loop is not None:
        from ampcompare.diagnosis.profiling.measure import profile_and_trace_of_loop

        return profile_and_trace_of_loop(loop, config, steps=options.steps, profiled=options.profiled)
    with tempfile.TemporaryDirectory(prefix="ampcompare-profile-") as folder:
        if config.script is not None:
            return profile_and_trace_of_script(
                config, Path(folder), steps=options.steps, profiled=options.profiled
            )
        path = Path(folder) / RunFile.TRACE
        found = profile_in_child(config, options, path)
        return found, json.loads(path.read_text(encoding="utf-8"))


def steps_needed_for_profile(steps: int, profiled_steps: int) -> int:
    """Return how many steps a script has to make for a profile.

    Args:
        steps: that are timed.
        profiled_steps: that are profiled, behind those.
    """
    return steps + profiled_steps + 8


def profile_and_trace_of_script(
    config: RunConfig, folder: Path, *, steps: int, profiled: int
) -> tuple[ArmProfile, dict[str, Any]]:
    """Run a script under the arm of a configuration until its steps are profiled; return the profile and the trace.

    Returns:
        The profile of rank 0, with the times of all ranks, and its trace.
    """
    script = config.script
    assert script is not None
    request = ProfileRequest(
        settings=exec_settings_for_watching(config, config.parsed_arm, folder),
        is_module=script.is_module,
        steps=steps,
        profiled=profiled,
        answers=str(folder),
        ended=str(folder / ENDED),
    )
    what = f"profile, which takes {steps_needed_for_profile(steps, profiled)} steps"
    run_examined_script(config, folder, "profiled", request, request.answer_path_of_rank(0), what)
    files = [path for rank in range(config.processes) if (path := request.answer_path_of_rank(rank)).exists()]
    ranks = [ArmProfile.model_validate_json(path.read_text(encoding="utf-8")) for path in files]
    found = ranks[0].model_copy(
        update={"rank_seconds": [one.seconds for one in ranks] if len(ranks) > 1 else []}
    )
    return found, json.loads(request.trace_path.read_text(encoding="utf-8"))
