"""Whether two runs did the same work, so that their quality, step time or peak memory can be compared.

What is refused and what is only named is a table in docs/fairness.md. A setting of the launch that can move a result is
refused where it is not visible, and compared where the label of the row names it, as `half threads=8` of a sweep does.
"""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ampcompare.base.environment.fingerprint import SWITCHES
from ampcompare.base.files.loaded_code import names_of_differing_files
from ampcompare.base.formatting import format_few_names
from ampcompare.results.analysis.pairing.declared import why_not_as_declared
from ampcompare.results.analysis.pairing.pairs import Pair, Pairing, completed_or_diverged_runs
from ampcompare.results.analysis.pairing.scores import unlike_metrics_reason
from ampcompare.results.analysis.pairing.seeding import seed_shift_sentences, unlike_seed_line
from ampcompare.results.records.evaluation import emulated_type
from ampcompare.results.records.run import RunRecord, RunSummary, script_fault_remarks
from ampcompare.results.records.verdict import Verdict
from ampcompare.settings.config import NON_NUMERIC_SETTINGS, RunConfig
from ampcompare.settings.validation import paths_and_values

APART_BY_DESIGN = ("arm", "recipe.seed")
# How the samples of an update are divided; what counts is their sum, and each of these is named in the reading.
SPLIT = ("recipe.batch_size", "recipe.global_batch_size", "recipe.grad_accum_steps")
NO_WORK = (*SPLIT, "recipe.data.download")
# Settings outside of the recipe that change what is computed.
POLICY = (
    "on_nan", "rollback_every", "max_rollbacks", "stop_loss_scale", "max_skipped", "nan_patience", "tf32", "cpu_half",
    "autocast_lists", "parallel.sync_bn",
)  # fmt: skip
# Settings that change how long a step takes, or what it holds in memory.
SPEED = (
    "processes", "parallel.kind", "parallel.bucket_cap_mb", "parallel.delay_allreduce", "parallel.backend",
    "parallel.find_unused_parameters", "recipe.grad_accum_steps", "threads", "workers", "pin_memory", "prefetch",
    "drain_every", "warmup_steps", "deterministic",
)  # fmt: skip
SOFTWARE = ("torch", "cuda", "cudnn")
HARDWARE = ("device_name", "processor")
EVERYWHERE = ("numpy",)  # which torch loads, so that it need not be part of what a run computes
MAX_NAMED = 3
# share of the steps: beyond, as for other outliers, a median may be that of the skipped ones
MAX_SKIPPED = 0.25
FROM_THE_START = "Remove the file and run with --force to train from the start"
SEED_IT = "Seed what the script draws, or pass the seed on with --seed-arg"
DRAWN_OTHERWISE = "Torch {} and {} may draw otherwise from one seed: {}"
OF_STACKS = {
    "began from other weights": "--first-weights NAME lets all arms begin with the weights of one stack",
    "saw other first batches": "let Python or NumPy draw the order of the samples, which both draw alike",
}


def iter_settings(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every setting by its path, such as `recipe.optimizer.lr`; an empty group has none."""
    return ((path, value) for path, value in paths_and_values(values) if value != {})


def changed_settings(one: RunConfig, other: RunConfig) -> list[str]:
    """Return the paths of the settings in which two configurations differ, such as `recipe.optimizer.lr`.

    Args:
        one, other: configurations; their arms, their seeds, and how they were saved do not count.
    """
    first, second = _settings_that_change_numbers(one), _settings_that_change_numbers(other)
    if first == second:
        return []
    return [path for path in {**first, **second} if first.get(path) != second.get(path)]


def incomparable_quality_verdict(pairing: Pairing) -> Verdict:
    """Return the verdict where the quality of pairs cannot be compared; an empty one if they can."""
    return _incomparable_verdict(pairing, quality_incomparable_reason, _rounded_labels_or_codes_reason)


def incomparable_time_verdict(pairing: Pairing) -> Verdict:
    """Return the verdict where the step times of pairs cannot be compared; an empty one if they can."""
    pairs, same = pairing.pairs, pairing.same_software
    return (
        Verdict.because("not comparable", _mixed_runs_of_side_reason(pairs))
        or next(
            filter(None, (_incomparable_times_verdict(*pair, same_software=same) for pair in pairs)),
            Verdict(),
        )
        or Verdict.because("not comparable", _unlike_gpus_reason(pairs) or _confounded_host_reason(pairs))
    )


def incomparable_memory_verdict(pairing: Pairing) -> Verdict:
    """Return the verdict where the peaks of memory of pairs cannot be compared; an empty one if they can."""
    return _incomparable_verdict(pairing, quality_incomparable_reason, _unlike_timing_conditions_reason)


def _incomparable_verdict(pairing: Pairing, *reasons: Callable[..., str]) -> Verdict:
    found = (
        reason(*pair, same_software=pairing.same_software) for pair in pairing.pairs for reason in reasons
    )
    return Verdict.because(
        "not comparable", _mixed_runs_of_side_reason(pairing.pairs) or next(filter(None, found), "")
    )


def quality_incomparable_reason(arm: RunRecord, reference: RunRecord, *, same_software: bool = True) -> str:
    """Return how the work of two runs differs, so that their quality cannot be compared; "" if they can."""
    same_software = same_software and arm.config.stack == reference.config.stack
    return (
        unlike_metrics_reason(arm, reference)
        or steps_by_other_arm_text(arm)
        or steps_by_other_arm_text(reference)
        or _unlike_recipes_reason(arm, reference)
        or _unlike_scripts_reason(arm, reference)
        or _reference_not_as_declared_reason(reference)
        or _unlike_environment_variables_reason(arm, reference)
        or (unlike_code_reason(arm, reference) if same_software else "")
        or _unlabeled_setting_difference_reason(POLICY, arm, reference)
        or _unlike_validation_or_updates_reason(arm.summary, reference.summary)
        or (_unlike_environments_reason(SOFTWARE[:1], arm, reference) if same_software else "")
    )


def _rounded_labels_or_codes_reason(arm: RunRecord, reference: RunRecord, *, same_software: bool) -> str:
    """Return that one of two runs was trained on other labels or codes than its script gave it; "" if none was."""
    found = (run.script.rounded_codes for run in (arm, reference) if run.script is not None)
    return next(filter(None, found), "")


def _incomparable_times_verdict(arm: RunRecord, reference: RunRecord, *, same_software: bool) -> Verdict:
    jobs = max(arm.jobs, reference.jobs)
    emulated = emulated_type(arm.half) or emulated_type(reference.half)
    work = quality_incomparable_reason(arm, reference, same_software=same_software)
    if not work and jobs > 1 and not (_was_only_cell_on_gpus(arm) and _was_only_cell_on_gpus(reference)):
        work = f"{jobs} cells ran at once"
    conditions = (
        _too_many_skipped_steps_reason(arm.summary)
        or _too_many_skipped_steps_reason(reference.summary)
        or _unlike_timing_conditions_reason(arm, reference, same_software=same_software)
    )
    return (
        Verdict.because("not comparable", work)
        or Verdict.because("emulated", emulated)
        or Verdict.because("not comparable", conditions)
    )


def _was_only_cell_on_gpus(record: RunRecord) -> bool:
    """Return whether no other cell was on the GPUs of a run."""
    return record.jobs == 1 or (record.placement is not None and record.placement.alone)


def _unlike_gpus_reason(pairs: Sequence[Pair]) -> str:
    """Return that runs of a pool were on GPUs of several kinds: an arm may gain more on one than on another."""
    places = [run.placement for pair in pairs for run in pair if run.jobs > 1 and run.placement is not None]
    kinds = sorted({name for place in places for name in place.gpu_names})
    return f"on unlike GPUs: {' and '.join(kinds)}" if len(kinds) > 1 else ""


def _too_many_skipped_steps_reason(summary: RunSummary) -> str:
    """Return the reason if a run skipped so many steps that its median step time may be that of skipped steps."""
    if summary.skipped_steps <= MAX_SKIPPED * summary.num_steps:
        return ""
    return f"{summary.skipped_steps} of {summary.num_steps} steps skipped"


def _unlike_timing_conditions_reason(arm: RunRecord, reference: RunRecord, *, same_software: bool) -> str:
    """Return how the conditions of two runs of the same work differ, as time and memory need them equal."""
    here, there = arm.device_kind, reference.device_kind
    same_software = same_software and arm.config.stack == reference.config.stack
    return (
        (f"on {here}, not {there}" if here != there else "")
        or _unlike_environments_reason(HARDWARE, arm, reference)
        or (_unlike_environments_reason(SOFTWARE, arm, reference) if same_software else "")
        or _unlabeled_setting_difference_reason(SPEED, arm, reference)
        or machine_changes_at_resume_text(arm)
        or machine_changes_at_resume_text(reference)
    )


def steps_by_other_arm_text(record: RunRecord) -> str:
    """Return which other arm trained a run, and for how many steps, before its own arm resumed it."""
    parts = []
    before = 0
    own = record.config.arm
    for resumption in record.resumed:
        if resumption.arm and resumption.arm != own:
            steps = resumption.step - before
            parts.append(f"trained by {resumption.arm} for {steps} of {record.summary.num_steps} steps")
        before = resumption.step
    return " and ".join(parts)


def machine_changes_at_resume_text(record: RunRecord) -> str:
    """Return the changes of the machine at a resume from a checkpoint."""
    notes = dict.fromkeys(note for resumption in record.resumed for note in resumption.machine)
    return "; ".join(f"resumed with {note}" for note in notes)


def settings_named_by_label(record: RunRecord) -> set[str]:
    """Return the settings that the label of a row names after its arm, by the last part of their path."""
    words = record.arm.removeprefix(record.config.arm).split()
    return {name for name, equals, _ in (word.partition("=") for word in words) if equals}


def _mixed_runs_of_side_reason(pairs: Sequence[Pair]) -> str:
    """Return in what the runs of a side differ, so that it is not one arm; "" if both sides are uniform."""
    return next(filter(None, map(_mixed_runs_reason, zip(*pairs, strict=True))), "")


def _mixed_runs_reason(records: Sequence[RunRecord]) -> str:
    """Return in what the runs of one row differ, apart from their seeds, so that they are not one arm."""
    engines = {f"{record.engine.name} {record.engine.version}" for record in records if record.engine}
    libraries = {record.training_library_text for record in records}
    halves = {record.half for record in records if record.half}
    for what in (engines, libraries, halves):
        if len(what) > 1:
            return f"{' and '.join(sorted(what))} in one row"
    first = records[0]
    for record in records[1:]:
        reason = (
            _unlike_recipes_reason(record, first)
            or _unlike_environment_variables_reason(record, first)
            or unlike_code_reason(record, first)
            or _setting_differences_text(POLICY, record, first)
        )
        if reason:
            return f"{reason}, in one row"
    return ""


def _unlike_recipes_reason(arm: RunRecord, reference: RunRecord) -> str:
    """Return how the recipes of two runs differ, the samples of an update being counted over all processes."""
    paths = [path for path in changed_settings(arm.config, reference.config) if path.startswith("recipe.")]
    here, there = arm.config.samples_per_update, reference.config.samples_per_update
    words = [f"global batch size {here}, not {there}"] if here != there else []
    words += _setting_difference_words(
        [path for path in paths if path not in NO_WORK], arm.config, reference.config
    )
    return _join_first_texts(words)


def _unlike_scripts_reason(arm: RunRecord, reference: RunRecord) -> str:
    """Return that two runs are not of the same script, or that it did not evaluate as often in both."""
    here, there = arm.config.script, reference.config.script
    if here != there:
        if here and there and here.model_copy(update={"sha256": there.sha256}) == there:
            return f"of another version of {here.name}"
        return "of another script, or with other arguments"
    seen, seen_there = (run.script.seen if run.script is not None else {} for run in (arm, reference))
    unlike = next((name for name in seen.keys() & seen_there.keys() if seen[name] != seen_there[name]), None)
    return "" if unlike is None else f"{unlike} was evaluated {seen[unlike]} times, not {seen_there[unlike]}"


def _unlike_environment_variables_reason(arm: RunRecord, reference: RunRecord) -> str:
    """Return which variable of the environment that changes numbers two runs did not share; "" if they shared all."""
    for name in SWITCHES:
        here, there = arm.environment.get(name) or "", reference.environment.get(name) or ""
        if here != there:
            return f"{name} {here or 'unset'}, not {there or 'unset'}"
    return ""


def unlike_code_reason(arm: RunRecord, reference: RunRecord) -> str:
    """Return in which of the user's files, or of the packages that these import, two runs differ; "" if in none."""
    files = names_of_differing_files(arm.code or {}, reference.code or {})
    variables, files = (
        [name for name in files if name.startswith("$") == is_one] for is_one in (True, False)
    )
    if files:
        return f"of another version of {_join_first_texts(files, ', ')}"
    if variables:
        return f"with another {_join_first_texts(variables, ', ')}"
    packages = [
        name for name in names_of_differing_files(arm.packages, reference.packages) if name not in EVERYWHERE
    ]
    return _join_first_texts(
        [f"{name} {arm.packages[name]}, not {reference.packages[name]}" for name in packages]
    )


def _reference_not_as_declared_reason(reference: RunRecord) -> str:
    why = why_not_as_declared([reference])
    return f"{reference.arm}, the reference, is not as declared: {why}" if why else ""


def _unlike_validation_or_updates_reason(arm: RunSummary, reference: RunSummary) -> str:
    """Return how validation differs, and updates, unless a run ended early or went back as its recipe allows."""
    free = any(
        summary.ended or summary.rollbacks or summary.diverged_step is not None
        for summary in (arm, reference)
    )
    if arm.num_steps != reference.num_steps and arm.num_steps and reference.num_steps and not free:
        return f"{arm.num_steps} updates, not {reference.num_steps}"
    if not arm.epochs or not reference.epochs:
        return ""
    here, there = arm.epochs[-1], reference.epochs[-1]
    if here.samples != there.samples:
        return f"validated on {here.samples} samples, not {there.samples}"
    labels = {last.per_sample.labels_sha256 for last in (here, there) if last.per_sample is not None}
    differ = len({here.chance, there.chance} - {None}) > 1 or len(labels) > 1
    return "validated on samples with other labels" if differ else ""


def _unlike_environments_reason(names: Sequence[str], arm: RunRecord, reference: RunRecord) -> str:
    for name in names:
        here, there = arm.environment.get(name), reference.environment.get(name)
        if here != there:
            return f"{name.replace('_', ' ')} {here}, not {there}"
    return ""


def _unlabeled_setting_difference_reason(paths: Sequence[str], arm: RunRecord, reference: RunRecord) -> str:
    """Return in which of these settings two runs differ, unless the label of a row names them."""
    named = settings_named_by_label(arm) | settings_named_by_label(reference)
    return _setting_differences_text(
        [path for path in paths if path.rpartition(".")[2] not in named], arm, reference
    )


def _setting_differences_text(paths: Sequence[str], arm: RunRecord, reference: RunRecord) -> str:
    changed = changed_settings(arm.config, reference.config)
    return _join_first_texts(
        _setting_difference_words([path for path in paths if path in changed], arm.config, reference.config)
    )


def _confounded_host_reason(pairs: Sequence[Pair]) -> str:
    """Return on which host one side alone ran, in all pairs over two hosts, where these are half of all or more."""
    apart = [
        (arm.host, other.host) for arm, other in pairs if arm.host and other.host and arm.host != other.host
    ]
    here, there = {host for host, _ in apart}, {host for _, host in apart}
    if not apart or 2 * len(apart) < len(pairs) or here & there or min(len(here), len(there)) > 1:
        return ""
    return f"on host {', '.join(sorted(here))}, not {', '.join(sorted(there))}"


def _settings_that_change_numbers(config: RunConfig) -> Mapping[str, Any]:
    """Return the settings that can change a number, but arm and seed; kept while `config` lives."""
    key = id(config)
    known = _known.get(key)
    if known is None or known[0]() is not config:
        given = iter_settings(config.model_dump(exclude=set(NON_NUMERIC_SETTINGS)))
        values = {path: value for path, value in given if path not in APART_BY_DESIGN}
        known = _known[key] = (weakref.ref(config, lambda _: _known.pop(key, None)), values)
    return known[1]


_known: dict[int, tuple[weakref.ref[RunConfig], Mapping[str, Any]]] = {}


def _setting_difference_words(paths: Sequence[str], arm: RunConfig, reference: RunConfig) -> list[str]:
    here, there = _settings_that_change_numbers(arm), _settings_that_change_numbers(reference)
    return [f"{path.rpartition('.')[2]} {here.get(path)}, not {there.get(path)}" for path in paths]


def _join_first_texts(words: Sequence[str], separator: str = "; ") -> str:
    return separator.join([*words[:MAX_NAMED], *(["..."] if len(words) > MAX_NAMED else [])])


DIFFERENCES: dict[str, Callable[[RunRecord], object]] = {
    "hosts": lambda record: record.host,
    "days (UTC)": lambda record: record.started and record.started[:10],
    "devices": lambda record: record.device_kind,
    "GPUs": lambda record: record.environment.get("device_name"),
    "processors": lambda record: record.environment.get("processor"),
    "versions of torch": lambda record: record.environment.get("torch"),
    "versions of CUDA": lambda record: record.environment.get("cuda"),
    "versions of Python": lambda record: record.environment.get("python"),
    "versions of ampcompare": lambda record: record.environment.get("ampcompare"),
    "numbers of processes": lambda record: record.config.processes,
    "micro-batches (samples that batch norm sees at once)": lambda record: (
        record.config.recipe.batch_size // record.config.recipe.grad_accum_steps
    ),
}


def lines_on_unlike_run_conditions(records: Sequence[RunRecord], reference: str) -> Iterator[str]:
    """Yield a line for each difference between the cells of a comparison, except arm, seed and settings."""
    rows: dict[str, list[RunRecord]] = {}
    for record in sorted(completed_or_diverged_runs(records), key=lambda record: record.arm != reference):
        rows.setdefault(record.arm, []).append(record)
    for what, value_of in DIFFERENCES.items():
        arms_of: dict[str, list[str]] = {}
        for arm, runs in rows.items():
            for value in sorted({str(value) for run in runs if (value := value_of(run)) is not None}):
                arms_of.setdefault(value, []).append(arm)
        if len(arms_of) > 1:
            shown = list(arms_of)
            if any(len(arms) < len(rows) for arms in arms_of.values()):
                shown = [f"{value} ({format_few_names(arms)})" for value, arms in arms_of.items()]
            yield f"Cells ran with different {what}: {'; '.join(shown)}."
    for arm, runs in rows.items():
        for text_of, end in (
            (steps_by_other_arm_text, f", so its results are not those of {arm} alone"),
            (machine_changes_at_resume_text, ""),
        ):
            texts = list(filter(None, map(text_of, runs)))
            for text in dict.fromkeys(texts):
                yield f"{arm}: {texts.count(text)} of {len(runs)} runs {text}{end}."
    if unread := sorted({arm for arm, runs in rows.items() if any(map(_lacks_gpu_readings, runs))}):
        yield (
            f"Not checked on the GPU of {', '.join(unread)}: clock, throttling, other processes; their times count as "
            "valid all the same. Install ampcompare[gpu] to read them."
        )


def _lacks_gpu_readings(record: RunRecord) -> bool:
    return record.device_kind == "cuda" and (record.readings is None or record.readings.clock_low_mhz is None)


def may_runs_be_paired(records: Sequence[RunRecord], reference: str) -> bool:
    """Return whether no runs of one seed are known to have started apart, or to be of other code."""
    return not any(
        start_difference_reason(*pair) or _unlike_script_files_reason(*pair)
        for pair in _pairs_with_reference(records, reference)
    )


def _pairs_with_reference(records: Sequence[RunRecord], reference: str) -> list[Pair]:
    theirs = {record.config.recipe.seed: record for record in records if record.arm == reference}
    return [
        (record, theirs[record.config.recipe.seed])
        for record in records
        if record.arm != reference and record.config.recipe.seed in theirs
    ]


def start_difference_reason(arm: RunRecord, reference: RunRecord) -> str:
    """Return how the starts of two runs of one seed differ, so that they are no pair; "" if no difference was seen."""
    here, there = arm.script, reference.script
    if here is None or there is None:
        return ""
    if resumed := here.resumed or there.resumed:
        return f"resumed from {os.path.basename(resumed[0])} of its own earlier attempt"
    is_meant = arm.config.first_weights != reference.config.first_weights  # a twin
    if here.weights and there.weights and here.weights[0] != there.weights[0] and not is_meant:
        return "began from other weights"
    seen = min(len(here.batches), len(there.batches))
    return "saw other first batches" if here.batches[:seen] != there.batches[:seen] else ""


def _torch_versions_of_unlike_stacks(record: RunRecord, other: RunRecord) -> tuple[str, str] | None:
    """Return the versions of torch of two runs in unlike stacks; None where there are not two."""
    torches = str(record.environment.get("torch", "")), str(other.environment.get("torch", ""))
    return torches if record.config.stack != other.config.stack and torches[0] != torches[1] else None


def script_pairing_and_departure_sentences(records: Sequence[RunRecord], reference: str) -> Iterator[str]:
    """Yield what was seen of the pairing of a script's runs, and in what their arms depart from what it asks for."""
    ran = [record for record in records if record.script is not None]
    pairs = _pairs_with_reference(ran, reference)
    apart: dict[tuple[str, str, str], list[str]] = {}
    for record, other in pairs:
        if reason := start_difference_reason(record, other):
            is_resumed = any(run.script and run.script.resumed for run in (record, other))
            than, remedy = ("", FROM_THE_START) if is_resumed else (f" than {reference}", SEED_IT)
            if not is_resumed and (seeds := unlike_seed_line(record, other)):
                remedy = f"{seeds}. {remedy}"
            elif not is_resumed and (torches := _torch_versions_of_unlike_stacks(record, other)) is not None:
                remedy = DRAWN_OTHERWISE.format(*torches, OF_STACKS[reason])
            cell = f"{record.arm}, seed {record.config.recipe.seed}"
            apart.setdefault((reason, than, remedy), []).append(cell)
    for (reason, than, remedy), cells in apart.items():
        yield (
            f"Not paired: {'; '.join(cells)} {reason}{than}, so their results are tested as separate samples. {remedy}."
        )
    other_code = sorted({_unlike_script_files_reason(*pair) for pair in pairs} - {""})
    for reason in other_code:
        yield f"Not paired: cells are {reason}, and have no verdict. Run the command that began them again."
    if pairs and not apart and not other_code:
        yield "Paired: in each seed all arms began from the same weights and saw the same first batches."
    yield from seed_shift_sentences(ran)
    arms: dict[str, dict[str, None]] = {}
    for record in ran:
        if record.script is None:
            continue
        for note in (*record.script.notes, *script_fault_remarks(record), *record.guards):
            arms.setdefault(note, {})[record.arm] = None
    for note, names in arms.items():
        yield f"{', '.join(names)}: {note}."


def _unlike_script_files_reason(arm: RunRecord, reference: RunRecord) -> str:
    files = names_of_differing_files(arm.code or {}, reference.code or {})
    return f"of other versions of {', '.join(files)}" if files else ""
