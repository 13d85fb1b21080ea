"""Whether the runs of a user's script are pairs: the same first weights, and the same first batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

from ampcompare.base.files.loaded_code import differing
from ampcompare.records.run import RunRecord

__all__ = ["are_pairs", "began_apart", "inherited_reason", "script_sentences"]

RESUMED = "resumed from"
FROM_THE_START = "Remove the file and run with --force to train from the start"
SEED_IT = "Seed what the script draws, or pass the seed on with --seed-arg"


def inherited_reason(record: RunRecord) -> str:
    """Return from which file that another run had written a script's cell has read; "" if there is none."""
    files = record.script.inherited if record.script is not None else []
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    if not files:
        return ""
    cell = f"{record.config.arm}, seed {record.config.recipe.seed},"
    return f"{cell} read {os.path.basename(files[0])}{more}, which another run had written"


def are_pairs(records: Sequence[RunRecord], reference: str) -> bool:
    """Return whether no runs of one seed are known to have started apart, or to be of other code."""
    theirs = {record.config.recipe.seed: record for record in records if record.arm == reference}
    for record in records:
        other = theirs.get(record.config.recipe.seed)
        if other is not None and record.arm != reference:
            if began_apart(record, other) or _other_code(record, theirs):
                return False
    return True


def began_apart(arm: RunRecord, reference: RunRecord) -> str:
    """Return how the starts of two runs of one seed differ, so that they are no pair; "" if no difference was seen."""
    here, there = arm.script, reference.script
    if here is None or there is None:
        return ""
    for record in (arm, reference):
        if record.script is not None and record.script.resumed:
            return f"{RESUMED} {os.path.basename(record.script.resumed[0])} of its own earlier attempt"
    if here.weights and there.weights and here.weights[0] != there.weights[0]:
        return "began from other weights"
    seen = min(len(here.batches), len(there.batches))
    return "saw other first batches" if here.batches[:seen] != there.batches[:seen] else ""


def script_sentences(records: Sequence[RunRecord], reference: str) -> Iterator[str]:
    """Yield what was seen of the pairing of a script's runs, and which files several of them wrote."""
    ran = [record for record in records if record.script is not None]
    theirs = {record.config.recipe.seed: record for record in ran if record.arm == reference}
    apart: dict[str, list[str]] = {}
    checked = 0
    for record in ran:
        seed = record.config.recipe.seed
        if record.arm == reference or seed not in theirs:
            continue
        checked += 1
        if reason := began_apart(record, theirs[seed]):
            apart.setdefault(reason, []).append(f"{record.arm}, seed {seed}")
    for reason, cells in apart.items():
        is_resumed = reason.startswith(RESUMED)
        than, remedy = ("", FROM_THE_START) if is_resumed else (f" than {reference}", SEED_IT)
        yield (
            f"Not paired: {'; '.join(cells)} {reason}{than}, so their results are tested as separate samples. {remedy}."
        )
    other_code = {reason for record in ran if (reason := _other_code(record, theirs))}
    for reason in sorted(other_code):
        yield f"Not paired: cells are {reason}, and have no verdict. Run the command that began them again."
    if checked and not apart and not other_code:
        yield "Paired: in each seed all arms began from the same weights and saw the same first batches."
    yield from _departures(ran)
    yield from _shared_files(ran)


def _other_code(record: RunRecord, theirs: Mapping[int, RunRecord]) -> str:
    other = theirs.get(record.config.recipe.seed)
    files = differing(record.code or {}, other.code or {}) if other is not None else []
    return f"of other versions of {', '.join(files)}" if files else ""


def _departures(records: Sequence[RunRecord]) -> Iterator[str]:
    arms: dict[str, dict[str, None]] = {}
    for record in records:
        for note in record.script.notes if record.script is not None else []:
            arms.setdefault(note, {})[record.arm] = None
    for note, names in arms.items():
        yield f"{', '.join(names)}: {note}."


def _shared_files(records: Sequence[RunRecord]) -> Iterator[str]:
    writers: dict[str, list[str]] = {}
    for record in records:
        for file in record.script.files if record.script is not None else []:
            writers.setdefault(file, []).append(f"{record.arm}, seed {record.config.recipe.seed}")
    for file, cells in writers.items():
        readers = [
            f"{record.arm}, seed {record.config.recipe.seed}"
            for record in records
            if record.script is not None and file in record.script.inherited
        ]
        if readers:
            yield (
                f"{'; '.join(readers)} read {file}, which another run had written, so that what they trained may "
                "continue from there: no verdict. Put {cell_dir} into the script's argument for it. If it is a cache "
                "that the first run makes, the same command with --force finds it there from the start."
            )
        elif len(cells) > 1:
            yield (
                f"{len(cells)} cells wrote {file}, {cells[0]}, first: each may have read what another left there. Put "
                "{cell_dir} into the script's argument for it."
            )
