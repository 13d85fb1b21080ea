"""Whether the runs of a user's script are pairs: the same first weights, and the same first batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ampcompare.records.run import RunRecord

__all__ = ["began_apart", "script_sentences"]


def began_apart(arm: RunRecord, reference: RunRecord) -> str:
    """Return how the starts of two runs of one seed differ, so that they are no pair; "" if no difference was seen."""
    here, there = arm.script, reference.script
    if here is None or there is None:
        return ""
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
        yield (
            f"Not paired: {'; '.join(cells)} {reason} than {reference}, so their results are tested as separate "
            "samples. Seed what the script draws, or pass the seed on with --seed-arg."
        )
    if checked and not apart:
        yield "Paired: in each seed all arms began from the same weights and saw the same first batches."
    yield from _departures(ran)
    yield from _shared_files(ran)


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
        if len(cells) > 1:
            yield (
                f"{len(cells)} cells wrote {file}, {cells[0]}, first: each may have read what another left there. Put "
                "{cell_dir} into the script's argument for it."
            )
