"""What is known of how a script seeds its generators: in a report, and why runs of several seeds are alike."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ampcompare.base.formatting import format_few_names
from ampcompare.results.records.comparison import SEEDS_ITSELF
from ampcompare.results.records.run import RunRecord, ScriptFacts, SeedCall
from ampcompare.settings.script import SEED_STRIDE, ScriptConfig


def key_of_run_start(facts: ScriptFacts) -> tuple[object, ...]:
    """Return what two runs have in common that began alike: first weights, batches, and what dropout drew there.

    Later draws are left out: how many numbers a layer draws may depend on its type.

    Returns:
        Equal for two runs that began alike. A part that was not recorded is empty, and equal in both.
    """
    return tuple(facts.weights), tuple(facts.batches), tuple(facts.draws[:1])


def why_seeds_are_one_run(script: ScriptConfig, facts: ScriptFacts | None, seed_option: str = "") -> str:
    """Return why runs of several seeds are one run, and what helps.

    Args:
        script: that trains, with the options for its seeds.
        facts: what was seen of the script.
        seed_option: of the script, if it has one.
    """
    if script.shift_seeds is None:
        return _why_unshifted_seeds_are_one_run(facts, seed_option)
    calls = (None if facts is None else facts.seeds) or []
    own = [call for call in calls if call.kind == "own"]
    if own and script.shift_seeds == "global":
        return (
            f"the script seeds generators of its own, {format_few_names(seed_line_texts(own))}, which "
            "--shift-seeds all shifts"
        )
    loaded = [f"{call.function} in {call.place}" for call in calls if call.kind == "load"]
    shifted = [call for call in calls if call.used] or _fixed_global_seeds(calls)
    if shifted:
        said = f"{format_few_names(seed_line_texts(shifted))} decides neither first weights nor batches"
    else:
        said = "the script seeds no generator that decides first weights or batches"
    files = f"files ({format_few_names(loaded)})" if loaded else "files"
    sources = [*_unshiftable_generators(calls), files, "fixed numbers in a fixed order"]
    return f"{said}, which come from {_alternatives_text(sources)}"


def _why_unshifted_seeds_are_one_run(facts: ScriptFacts | None, seed_option: str) -> str:
    """Return why runs of a script are one run where nothing shifts what it seeds."""
    if facts is None or facts.seeds is None:
        return SEEDS_ITSELF
    if seed_option:
        pass_on = f"--seed-arg={seed_option} passes it on"
    else:
        pass_on = "pass it on with --seed-arg, or as {seed}"
    if fixed := _fixed_global_seeds(facts.seeds):
        lines = format_few_names(seed_line_texts(fixed))
        return f"the script seeds {lines}: --shift-seeds shifts that for each seed, or {pass_on}"
    others = "generators of its own, which --shift-seeds all shifts"
    sources = [*_unshiftable_generators(facts.seeds), "files", "fixed numbers", others]
    return (
        "the script seeds no global generator, so its first weights and batches come from "
        f"{_alternatives_text(sources)}; or {pass_on}"
    )


def _fixed_global_seeds(calls: Sequence[SeedCall]) -> list[SeedCall]:
    return [call for call in calls if call.kind == "global" and call.seed]


def fixes_seed_of_torch(records: Sequence[RunRecord]) -> bool:
    """Return whether a script seeds torch alike in each run, and no option shifts that or passes a seed on."""
    record = next((one for one in records if one.script is not None and one.script.seeds is not None), None)
    script = None if record is None else record.config.script
    if record is None or record.script is None or script is None or script.shift_seeds is not None:
        return False
    here, there = (script.arguments_for(seed, record.config.arm, Path("cell")) for seed in (0, 1))
    fixed = _fixed_global_seeds(record.script.seeds or ())
    return here == there and any(call.function.startswith("torch.") for call in fixed)


def _unshiftable_generators(calls: Sequence[SeedCall]) -> list[str]:
    """Return generators whose seed is decided by what cannot be shifted."""
    setters = [f"{call.function} in {call.place}" for call in calls if call.kind == "state" and call.place]
    sources = [f"a generator whose state is set ({format_few_names(setters)})"] if setters else []
    if any(call.kind == "state" and not call.place for call in calls):
        sources.append(
            "torch's generator, which a method of its own seeds (torch.default_generator.manual_seed; what "
            "torch.manual_seed seeds can be shifted)"
        )
    return sources


def _alternatives_text(sources: Sequence[str]) -> str:
    return f"{', '.join(sources[:-1])} or {sources[-1]}"


def seed_shift_sentences(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yield which seeds of a script were shifted, by how much, and which were not."""
    shifting = [
        record
        for record in records
        if record.config.script is not None and record.config.script.shift_seeds is not None
    ]
    calls = _distinct_seed_calls(
        call for record in shifting if record.script is not None for call in record.script.seeds or ()
    )
    if not shifting:
        return
    fixed = [call for call in calls if call.seed]
    is_all = any(
        record.config.script is not None and record.config.script.shift_seeds == "all" for record in shifting
    )
    shifted = [call for call in fixed if call.kind == "global" or is_all]
    if shifted:
        yield (
            f"Shifted seeds: seed k adds {SEED_STRIDE} k to {format_few_names(seed_line_texts(shifted))}; "
            "seed 0 is the script as written."
        )
    else:
        yield "Shifted seeds: the script seeds nothing that could be shifted."
    if left := [
        call for call in fixed if call not in shifted and _is_seeded_alike_in_all_runs(call, shifting)
    ]:
        yield (
            f"Not shifted, in all seeds as written: {format_few_names(seed_line_texts(left))}; --shift-seeds all "
            "shifts them too."
        )


def _is_seeded_alike_in_all_runs(call: SeedCall, records: Sequence[RunRecord]) -> bool:
    """Return whether a line seeds with one number in all runs: another one in each is drawn, as by a library."""
    known = (one for record in records if record.script is not None for one in record.script.seeds or ())
    return len({one.seed for one in known if (one.place, one.function) == (call.place, call.function)}) == 1


def unlike_seed_line(arm: RunRecord, reference: RunRecord) -> str:
    """Return which line seeds two runs of one seed with different numbers, as by the time; "" if none does."""
    if arm.script is None or reference.script is None:
        return ""
    theirs = {(call.place, call.function): call for call in reference.script.seeds or ()}
    for call in arm.script.seeds or ():
        other = theirs.get((call.place, call.function))
        if call.kind == "global" and not call.seed:
            return f"{call.place} seeds {call.function} with the system's entropy"
        if other is not None and other.seed != call.seed and call.kind in ("global", "own"):
            return f"{call.place} seeds {call.function} with another number in each run"
    return ""


def _distinct_seed_calls(calls: Iterable[SeedCall]) -> list[SeedCall]:
    found: dict[tuple[str, str], SeedCall] = {}
    for call in calls:
        found.setdefault((call.place, call.function), call)
    return list(found.values())


def seed_line_texts(calls: Sequence[SeedCall]) -> list[str]:
    """Return lines with what each of them seeds: functions that get one number together, as `set_seed` calls them."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for call in calls:
        groups.setdefault((call.place, call.seed, call.kind), []).append(call.function)
    return [f"{'/'.join(functions)}({seed}) in {place}" for (place, seed, _), functions in groups.items()]
