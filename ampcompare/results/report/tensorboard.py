"""Event files for TensorBoard: one folder per arm and seed, the same tags for all, so that curves lie over each other.

Written from records and `steps.jsonl` by the `tensorboard` package alone, so that this process needs no torch.
"""

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ampcompare.base.errors import EnvironmentUnfit, RecordError
from ampcompare.base.files.run_files import CellFile, file_of_cell
from ampcompare.base.files.write import write_file
from ampcompare.results.records.comparison import Comparison
from ampcompare.results.records.run import RunRecord
from ampcompare.results.report.export import Exporter, Point, points_of_record

MAX_NAME = 80
SUFFIX = ".ampcompare"


class TensorBoardExporter(Exporter):
    """Keeps a folder of event files up to date with a comparison: what TensorBoard is pointed to with `--logdir`."""

    def __init__(self, folder: Path, note: Callable[[str], None], project: str = "") -> None:
        super().__init__(folder, note, project)
        self._reported: set[str] = set()

    def export_records(self, comparison: Comparison, folder: Path) -> None:
        """Write the event files that are missing for the records of a comparison whose run directory is `folder`."""
        for record in comparison.records:
            steps = folder / file_of_cell(record.cell, CellFile.STEPS)
            if steps.exists():
                self._write_event_file(record, folder, steps.stat())

    def _write_event_file(self, record: RunRecord, run: Path, steps: os.stat_result) -> None:
        folder = self._folder / run_name(record.arm, record.config.recipe.seed)
        # TensorBoard reads on where it was in a file of a known name: a cell that ran again needs a new one.
        path = folder / f"events.out.tfevents.{steps.st_mtime_ns}.{record.cell}{SUFFIX}"
        if path.exists() or record.cell in self._reported:
            return
        try:
            points = list(points_of_record(record, run))
        except RecordError as error:
            self._reported.add(record.cell)
            self._note(f"no event file for {record.arm}, seed {record.config.recipe.seed}: {error}")
            return
        if not points:
            return
        try:
            content = _encode_points(points, begin=steps.st_mtime - points[-1][0])
            # TensorBoard reads every file with `tfevents` in its name, an unfinished one too.
            write_file(path, lambda file: file.write(content), unfinished="writing")
            for older in folder.glob(f"events.out.tfevents.*{SUFFIX}"):
                if older != path:
                    older.unlink(missing_ok=True)
        except OSError as error:
            raise EnvironmentUnfit(
                f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
            ) from error


def run_name(label: str, seed: int) -> str:
    """Return the run of an arm and a seed below the log folder, for any text of an arm; two arms never share one."""
    word = re.sub(r"[^A-Za-z0-9_.=,+-]", "_", label.replace(":", "-").replace(" ", "+"))[:MAX_NAME].lstrip(
        "."
    )
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.=,: ]*", label) or len(label) > MAX_NAME:
        word = f"{word}-{hashlib.sha256(label.encode(errors='surrogatepass')).hexdigest()[:8]}".lstrip("-")
    return f"{word}/seed={seed}"


def _encode_points(points: Iterable[Point], begin: float) -> bytes:
    """Return the bytes of an event file."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    writer = RecordWriter(buffer)
    writer.write(Event(wall_time=begin, file_version="brain.Event:2").SerializeToString())
    for elapsed, step, values in points:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        writer.write(Event(wall_time=begin + elapsed, step=step, summary=summary).SerializeToString())
    return buffer.getvalue()
