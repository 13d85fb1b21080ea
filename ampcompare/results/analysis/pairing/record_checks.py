"""Validate a record: it belongs to its cell, was not changed after it was written, and is one run.

A fault is one sentence: what was read, and what was expected. A record with a fault is named and not used. Nothing
here needs torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ampcompare.base.errors import RecordError
from ampcompare.base.files.run_files import RunFile
from ampcompare.results.analysis.pairing.seeding import key_of_run_start, why_seeds_are_one_run
from ampcompare.results.records.comparison import SEEDS_ITSELF
from ampcompare.results.records.document import read_validated_and_plain_json, record_checksum
from ampcompare.results.records.run import RunRecord


class DuplicateRun(NamedTuple):
    """A record that is not another run: whose it is and why, and whether its script seeds itself, as all seeds do."""

    text: str
    by_script: bool


def read_checked_record(path: Path) -> RunRecord:
    """Read the record of a cell, and check it against its folder and its checksum.

    Raises:
        RecordError: it cannot be read, or has a fault; the message names the file, what was read and what was expected.
    """
    record, raw = read_validated_and_plain_json(path, RunRecord, "run record")
    check_record(path, raw, record)
    return record


def check_record(path: Path, raw: Mapping[str, Any], record: RunRecord) -> None:
    """Check a record against its folder and its checksum.

    Args:
        path: of its file, which tells the cell if it is in a run directory.
        raw: the plain content of the file.
        record: what was read from it.

    Raises:
        RecordError: it was changed after it was written, or is the record of another cell.
    """
    folder = path.absolute().parent
    if folder.parent.name == RunFile.CELLS and folder.name != record.cell:
        whose = f"{record.config.arm}, seed {record.config.recipe.seed}"
        fault = (
            f"it is the record of cell {record.cell} ({whose}), but is in the folder of cell {folder.name}"
        )
    elif raw.get("checksum") is None and record.host is not None:  # an old record has neither
        fault = "it has no checksum, which every record with a host has"
    elif raw.get("checksum") not in (None, record_checksum(raw)):
        fault = "it was changed after it was written: its checksum does not match"
    else:
        return
    raise RecordError(f"{path}: {fault}")


BEGAN_OTHERWISE = (
    ", though it began from other weights or batches: they decide nothing there, as where all outputs are 0"
)


def unique_and_duplicate_runs(records: Sequence[RunRecord]) -> tuple[list[RunRecord], list[DuplicateRun]]:
    """Return the records that are one run each, and those that are not used.

    A cell counts once, and so does a completed run whose losses equal those of a lower seed of its arm to the last bit.
    A script that began from the weights and batches of a lower seed is no other run either, whatever its losses: they
    differ by what the seed does not determine, such as the order of additions on a GPU.
    """
    copies: dict[int, DuplicateRun] = {}
    cells: set[tuple[str, int]] = set()
    first: dict[tuple[object, ...], int] = {}
    for number, record in sorted(enumerate(records), key=lambda item: item[1].config.recipe.seed):
        seed, script = record.config.recipe.seed, record.script
        marks: dict[tuple[object, ...], str] = {}
        if record.status == "completed" and (digest := record.summary.losses_sha256) is not None:
            marks["losses", record.arm, digest] = "its losses are those of seed {} to the last bit"
        if record.has_result and script is not None and script.weights and script.batches:
            marks["start", record.arm, *key_of_run_start(script)] = (
                "its first weights and batches are those of seed {}"
            )
        is_second = (record.arm, seed) in cells
        seen = {
            mark[0]: words.format(first[mark])
            for mark, words in marks.items()
            if first.setdefault(mark, seed) != seed
        }
        fault = "a second record of this cell" if is_second else next(iter(seen.values()), "")
        if fault:
            began_otherwise = "start" in {mark[0] for mark in marks} - seen.keys()
            if began_otherwise and not is_second:
                fault += BEGAN_OTHERWISE
            by_script = not is_second and script is not None and not began_otherwise
            config = record.config.script
            if not is_second:
                fault += ", so it is not an independent run"
            if by_script:
                fault += f"; {SEEDS_ITSELF if config is None else why_seeds_are_one_run(config, script)}"
            copies[number] = DuplicateRun(f"{record.arm}, seed {seed}: {fault}", by_script)
        else:
            cells.add((record.arm, seed))
    kept = [record for number, record in enumerate(records) if number not in copies]
    return kept, [copies[number] for number in sorted(copies)]
