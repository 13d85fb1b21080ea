"""Write what every backward pass and step of a script did, as JSON lines, at little cost to the script.

A step is written when it ends, so that nothing of it is lost where the script is killed. Losses on a device stay there
until a block of rows is written, so that recording does not make the script wait.
"""

import functools
import multiprocessing.util
import os
import re
import shlex
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_json

from ampcompare import apex
from ampcompare.base.environment.fingerprint import environment_fingerprint
from ampcompare.base.environment.ranks import rank_of_process
from ampcompare.base.environment.variables import CELL_FOLDER
from ampcompare.base.errors import EnvironmentUnfit
from ampcompare.base.secrets.files import note_secrets_in_files
from ampcompare.base.secrets.masking import hide_secrets_in_words, mask_secrets
from ampcompare.results.records.document import dump_json
from ampcompare.script.invocation.exec_settings import ExecSettings
from ampcompare.script.invocation.stderr import say_once
from ampcompare.script.recording.summary import FORMAT, SCHEMA, read_exec_record, summary_text

MAX_ROWS_HELD = 256
MAX_SECONDS_HELD = 1.0
# What may wait for a device, by the kind of row.
UNREAD = {
    "backward": ("loss", "scale_before", "scale_after"),
    "plain_backward": ("loss",),
    "step": ("applied",),
}
NUMBERS = (*UNREAD, "metric")  # kinds of rows that hold no text but the name of a metric
KNOWN = (float, bool, type(None), int)  # types of values that wait for nothing


def record_header(settings: ExecSettings) -> dict[str, Any]:
    """Return the first row of a record: what ran, and where. Secrets in the script's files stay out of all rows."""
    note_secrets_in_files(settings.name, settings.arguments)
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "script": settings.name,
        "engine": settings.engine,
        "engine_version": apex.__version__ if settings.engine == "compat" else "unknown",
        "opt_level": settings.opt_level,
        "device": settings.device,
        "arguments": hide_secrets_in_words(settings.arguments),
        "environment": environment_fingerprint(),
    }


class Recorder:
    """Writes rows at each step; those that wait for a device in blocks: at most 256 of them, or those of a second.

    Rank n > 0 of a distributed run writes `NAME.rankN.SUFFIX`; processes that the script spawns or forks write their
    own files as soon as they train.

    Args:
        path: the file; an existing one is replaced. None writes nothing: others are called with each row all the same.
        first: the header.
        child: the name of this process, if the script has spawned it.

    Raises:
        EnvironmentUnfit: the file cannot be written.
    """

    def __init__(self, path: str | None, first: dict[str, Any], *, child: str | None = None) -> None:
        self._path = None if path is None else _path_of_process(Path(path), child)
        self._first = first
        self._started_in = Path.cwd()
        self._rows: list[dict[str, Any]] = []
        self._waits = False  # some row has a value that a device may not have computed yet
        self._due = time.perf_counter() + MAX_SECONDS_HELD
        self._descriptor: int | None = None
        self._is_child = child is not None
        self._before_close: list[Callable[[], None]] = []
        self._after_row: list[Callable[[dict[str, Any]], None]] = []
        if child is None:
            self._open_record_file()
        if hasattr(os, "register_at_fork"):  # where processes can be forked
            os.register_at_fork(after_in_child=self._leave_file_to_parent)

    def add_row(self, row: dict[str, Any]) -> None:
        """Keep a row, whose `loss` may be a tensor of one element; write what is kept when it is due."""
        if self._descriptor is None:
            self._open_record_file()
        self._rows.append(row)
        self._waits = self._waits or any(type(row[name]) not in KNOWN for name in UNREAD.get(row["kind"], ()))
        ends_step = row["kind"] == "step" and not self._waits
        if ends_step or len(self._rows) >= MAX_ROWS_HELD or time.perf_counter() > self._due:
            self.write_held_rows()
        for function in self._after_row:
            function(row)

    def call_before_close(self, function: Callable[[], None]) -> None:
        """Call a function, which may add rows, when the record ends."""
        self._before_close.append(function)

    def call_after_each_row(self, function: Callable[[dict[str, Any]], None]) -> None:
        """Call a function with each row that is added from now on; it may raise to end the script."""
        self._after_row.append(function)

    def find_step_sums_text(self) -> str | None:
        """Return steps, skipped steps, loss scales and the report command in words; None if nothing was recorded."""
        if self._path is None:
            return None
        summary = read_exec_record(self._path)
        if not summary.losses and not summary.optimizers:
            return None
        is_below = self._path.is_relative_to(self._started_in)  # the script may have changed its folder since
        path = self._path.relative_to(self._started_in) if is_below else self._path
        return f"{summary_text(summary)}; for more: ampcompare report {shlex.quote(str(path))}"

    def write_held_rows(self) -> None:
        """Write the rows that are held."""
        self._due = time.perf_counter() + MAX_SECONDS_HELD
        rows = self._rows
        self._rows = []
        self._waits = False
        if rows and self._descriptor is not None:
            self._replace_device_values(rows)
            self._write_rows(rows)

    def close(self, status: int | None, error: str | None, advice: dict[str, Any] | None = None) -> None:
        """Write the last row, unless this process never trained.

        Args:
            status: the exit code; None if it is not known.
            error: with which the script ended.
            advice: fields of an `ArmAdvice` on it, and the error without it as `seen`.
        """
        if self._descriptor is None and self._path is not None:
            return
        functions, self._before_close = self._before_close, []
        for function in functions:
            function()
        end = {"kind": "end", "exit_code": status, "error": error}
        self._rows.append(end if advice is None else {**end, "advice": advice})
        self.write_held_rows()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open_record_file(self) -> None:
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            raise EnvironmentUnfit(
                f"cannot write the record {self._path}: {error.strerror or error}; name another file with --record"
            ) from error
        self._write_rows([self._first])
        if self._is_child:
            # Registered here: a forked child clears what was registered before the fork.
            multiprocessing.util.Finalize(self, self.close, args=(None, None), exitpriority=0)

    def _write_rows(self, rows: list[dict[str, Any]]) -> None:
        assert self._descriptor is not None
        text = "".join(
            _row_as_line(_row_with_masked_name(row) if row.get("kind") == "metric" else row) for row in rows
        )
        # to mask a text takes longer than to record a step
        if any(row.get("kind") not in NUMBERS for row in rows):
            text = mask_secrets(text, of_script=any(row.get("error") for row in rows))
        try:
            os.write(self._descriptor, text.encode("utf-8"))
        except OSError as error:  # a full disk must not end the training
            say_once(f"the record {self._path} cannot be written ({error.strerror or error}); rows are lost")

    @staticmethod
    def _replace_device_values(rows: list[dict[str, Any]]) -> None:
        """Replace what is known by now, and losses and scales on a device, by values, with one read for each device."""
        waiting: dict[torch.device, list[tuple[dict[str, Any], str, torch.Tensor]]] = {}
        for row in rows:
            for name in UNREAD.get(row["kind"], ()):
                value = row[name]
                if type(value) in KNOWN:
                    continue
                if callable(value):
                    value = row[name] = value()
                if isinstance(value, torch.Tensor):
                    waiting.setdefault(value.device, []).append((row, name, value))
        for entries in waiting.values():
            values = torch.stack([value.reshape(()).double() for _, _, value in entries]).tolist()
            for (row, name, _), value in zip(entries, values, strict=True):
                row[name] = value

    def _leave_file_to_parent(self) -> None:
        """Leave the file to the parent, in a forked child."""
        self._rows, self._waits = [], False
        self._descriptor = None
        self._is_child = True
        if self._path is not None:
            self._path = self._path.with_name(f"{self._path.stem}.pid{os.getpid()}{self._path.suffix}")


def _row_with_masked_name(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "name": _masked(row["name"])}


_masked = functools.lru_cache(1024)(mask_secrets)


def _row_as_line(row: dict[str, Any]) -> str:
    try:
        line = to_json(row).decode() + "\n"
        is_strict = "NaN" not in line and "Infinity" not in line
    except ValueError:  # of text that is no Unicode, such as a path
        is_strict = False
    return line if is_strict else dump_json(row, indent=None) + "\n"


def _path_of_process(path: Path, child: str | None) -> Path:
    marks = []
    if (rank := rank_of_process()) > 0:
        marks.append(f"rank{rank}")
    if child is not None:
        marks.append(re.sub(r"[^\w.-]", "_", child))
    return path.with_name(".".join([path.stem, *marks]) + path.suffix) if marks else path


class RecordedSteps:
    """The optimizers of a process, in the order of their first use, and what they did.

    Attributes:
        has_initialized: the script has called `amp.initialize`.
        blocks: of `scale_loss` that are open.
        ignored: GradScalers that are off, and any `FP16_Optimizer` under an arm: both are recorded elsewhere.
        on_step: called with the number of an optimizer right after its step; it may raise to end the script.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.optimizers: list[Any] = []
        self.has_initialized = False
        self.blocks = 0
        self.ignored: weakref.WeakSet[Any] = weakref.WeakSet()
        self.on_step: Callable[[int], None] | None = None
        self._steps: list[int] = []
        self._last_step: list[float | None] = []
        self._backwards = 0
        self._loss_ids = 0

    @property
    def num_steps(self) -> int:
        """The recorded steps of all optimizers, those that were skipped among them."""
        return sum(self._steps)

    @property
    def is_outside_scale_loss_blocks(self) -> bool:
        """Whether a script for Apex is in no block of `scale_loss`; a loss is that of a regularizer, say."""
        return self.has_initialized and not self.blocks

    def optimizer_number_and_is_new(self, optimizer: Any) -> tuple[int, bool]:
        """Return the number of an optimizer, and whether it is new."""
        for number, other in enumerate(self.optimizers):
            if other is optimizer:
                return number, False
        self.optimizers.append(optimizer)
        self._steps.append(0)
        self._last_step.append(None)
        return len(self.optimizers) - 1, True

    def make_loss_id(self) -> int:
        """Return a number for the losses of a scaler."""
        self._loss_ids += 1
        return self._loss_ids - 1

    def reserve_loss_ids(self, count: int) -> None:
        """Reserve the first `count` numbers for `apex.amp`, which numbers its losses itself."""
        self._loss_ids = max(self._loss_ids, count)

    def add_initialize(
        self, opt_level_or_scaler: str, optimizers: dict[int, str], scales: list[Any], dynamic: list[bool]
    ) -> None:
        """Record what scales the losses of which optimizers.

        Args:
            opt_level_or_scaler: the opt level, or the class of the scaler.
            optimizers: class by number, from 0.
            scales: the loss scales, in the order of their losses.
            dynamic: of each scale, whether it moves.
        """
        row = {
            "kind": "initialize",
            "opt_level": opt_level_or_scaler,
            "optimizers": {str(number): name for number, name in optimizers.items()},
            "loss_scales": scales,
            "dynamic": dynamic,
        }
        self.recorder.add_row(row)

    def add_backward(
        self,
        loss: Any,
        loss_id: int,
        scales_before_and_after: tuple[Any, Any],
        overflow: bool | None,
        optimizer_numbers: list[int],
        skipped_optimizers: list[int],
    ) -> None:
        """Record a backward pass.

        Args:
            loss: a number, a tensor of one element, or None.
            loss_id: as `amp.scale_loss` has it; 0 where nothing names one.
            scales_before_and_after: the loss scales, each a number, a tensor of one element, or what returns the number
                when the row is written; None if nothing scales.
            overflow: None if nothing was checked.
            optimizer_numbers: of the optimizers that the loss is for.
            skipped_optimizers: the numbers of those whose step is skipped because of this pass.
        """
        row = {
            "kind": "backward",
            "backward": self._backwards,
            "loss": loss,
            "loss_id": loss_id,
            "scale_before": scales_before_and_after[0],
            "scale_after": scales_before_and_after[1],
            "overflow": overflow,
            "optimizers": optimizer_numbers,
            "skips": skipped_optimizers,
        }
        self._backwards += 1
        self.recorder.add_row(row)

    def add_losses(self, losses: Sequence[Any], loss_id: int, scales: tuple[Any, Any], *outcome: Any) -> None:
        """Record the backward passes of an update, whose last one has its outcome.

        Args:
            losses: one for each backward pass.
            loss_id: as `amp.scale_loss` has it; 0 where nothing names one.
            scales: before and after the update.
            outcome: the further arguments of `add_backward`, of the last pass.
        """
        for loss in losses[:-1]:
            self.add_backward(loss, loss_id, (scales[0], scales[0]), None, outcome[1], [])
        if losses:
            self.add_backward(losses[-1], loss_id, scales, *outcome)

    def add_unscaled_backward(self, loss: Any) -> None:
        """Record a backward pass of a loss that nothing scales, next to `apex.amp`."""
        self.recorder.add_row({"kind": "plain_backward", "loss": loss})

    def add_arm_departure_note(self, text: str) -> None:
        """Record in what an arm departs from what the script asks for."""
        self.recorder.add_row({"kind": "note", "text": text})

    def add_rounding_remark(self, text: str) -> None:
        """Record what rounding takes from a script by its own line, and print it where no table will."""
        self.recorder.add_row({"kind": "remark", "text": text})
        if CELL_FOLDER not in os.environ:
            say_once(text)

    def add_rounded_labels_remark(self, text: str) -> None:
        """Record that an arm trains on other labels or codes than the script gives it, as a remark too."""
        self.add_rounding_remark(text)
        self.recorder.add_row({"kind": "rounded_codes", "text": text})

    def add_equal_numbers_remark(self, text: str, place: str) -> None:
        """Record where an evaluation compares 16-bit numbers of which many are equal, as a remark too.

        Args:
            text: of the remark.
            place: file and line.
        """
        self.add_rounding_remark(text)
        self.recorder.add_row({"kind": "equal_numbers", "place": place})

    def step_row(self, number: int, applied: bool | Callable[[], bool]) -> dict[str, Any]:
        """Return the row of a step that has just ended, or was skipped.

        Args:
            number: of the optimizer, from 0.
            applied: whether the step was made; a function says so later, where the device knows.
        """
        if self.on_step is not None:
            self.on_step(number)
        now = time.perf_counter()
        last = self._last_step[number]
        row = {
            "kind": "step",
            "optimizer": number,
            "step": self._steps[number],
            "applied": applied,
            "seconds": None if last is None else now - last,
        }
        self._last_step[number] = now
        self._steps[number] += 1
        return row

    def add_step(self, number: int, applied: bool | Callable[[], bool]) -> None:
        """Record a step that has just ended, or was skipped.

        Args:
            number: of the optimizer, from 0.
            applied: as `step_row` takes it.
        """
        self.recorder.add_row(self.step_row(number, applied))


def number_or_detached_tensor(loss: Any) -> Any:
    """Return a loss or scale as a number if that does not wait for a device, else as a separate tensor."""
    if not isinstance(loss, torch.Tensor):
        return float(loss) if isinstance(loss, (int, float)) else None
    if loss.numel() != 1:
        return None
    return loss.item() if loss.is_cpu else loss.detach().clone()
