"""The check behind `holds`: one run in fp32, some with added rounding, and for each arm one run and a diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import AmpCompareError, ConfigError
from ampcompare.base.formatting import printable
from ampcompare.diagnosis.cures import verdict_of, with_cure
from ampcompare.diagnosis.diagnose import report_of
from ampcompare.diagnosis.faults import find_faults
from ampcompare.diagnosis.holds.capture import Capture, Rounding
from ampcompare.diagnosis.holds.result import DoesNotHold, Figure, Held
from ampcompare.diagnosis.holds.subject import loop_of
from ampcompare.diagnosis.holds.tolerance import errors_of, rounding_unit, tolerances
from ampcompare.diagnosis.measure import Conditions, Loop, measure, trained_under
from ampcompare.diagnosis.observation import Observation
from ampcompare.diagnosis.observed import Enough
from ampcompare.diagnosis.search import Tested
from ampcompare.diagnosis.sites import calling_line
from ampcompare.records.diagnosis import Diagnosis, Fault, PlaceReport
from ampcompare.training.device import resolve_device

__all__ = ["Check"]

FP32 = Arm.parse("fp32")
DRAWS = 3
MAX_ROWS = 10
# What an optimizer step loses is no property of a module, whose weights are left as they are.
OF_STEPS = ("lost updates", "update")
PATCHING = ("O1", "O4")


class Check:
    """A subject, and what it gives in fp32; the arguments are those of `holds`."""

    def __init__(
        self,
        subject: Callable[..., Any],
        *,
        inputs: Sequence[Any] | Mapping[str, Any] | None,
        loss: Callable[[Any], Any] | None,
        rtol: float | str,
        steps: int,
        seed: int,
        device: str,
        strict_types: bool,
        cures: bool,
    ) -> None:
        if rtol != "auto" and not (isinstance(rtol, (int, float)) and rtol > 0):
            raise ConfigError(f'rtol must be "auto" or a number above 0, not {rtol!r}')
        if steps < 1:
            raise ConfigError(f"steps must be at least 1, not {steps}")
        if inputs is None and isinstance(subject, torch.nn.Module):
            raise ConfigError("a module is run on inputs; pass inputs=(tensor, ...)")
        if inputs is None and loss is not None:
            raise ConfigError("loss is of a module or function with inputs; a training loop has its own")
        on = str(resolve_device(device))
        self._loop: Loop = subject if inputs is None else loop_of(subject, inputs, loss, on)
        self._shown = [] if inputs is None or loss is not None else ["loss"]  # the default loss is no result
        self._has_steps = inputs is None
        self._name = "" if inputs is None or loss is not None else _name_of(subject)
        self._rtol = rtol
        self._strict_types = strict_types
        self._cures = cures
        self._conditions = Conditions(steps=steps, device=on, seed=seed)
        self._reference: dict[str, Tensor] | None = None
        self._rounded: dict[float, list[dict[str, Tensor]]] = {}  # figures with added rounding, by unit

    def arm(self, arm: Arm | str) -> Held:
        """Check one arm.

        Raises:
            DoesNotHold: it does not hold.
            ConfigError: there is no such arm, or the subject cannot be checked.
            EnvironmentUnfit: this machine lacks something that the arm needs.
        """
        __tracebackhide__ = True
        arm = _undoable(Arm.parse(arm) if isinstance(arm, str) else arm)
        reference = self._in_fp32()
        captured = self._captured(arm)
        figures = self._figures(captured, reference)
        diagnosis = self._diagnosed(arm)
        islands = tuple(
            f"{row.operation} ({', '.join(row.inputs)}) in {', '.join(row.modules)}: {row.remark}"
            for row in diagnosis.audit
            if row.remark
        )
        far = [figure for figure in figures if not figure.holds]
        if diagnosis.faults or far or (islands and self._strict_types):
            lines = _message(arm, diagnosis, figures, islands if self._strict_types else ())
            text = "\n".join(lines)
            if self._name:  # what runs in no module inside of the subject runs in the subject itself
                text = text.replace("outside of modules", f"of {self._name}")
            raise DoesNotHold(text, str(arm), figures, diagnosis)
        return Held(str(arm), tuple(figures), captured.skipped, islands)

    def _in_fp32(self) -> dict[str, Tensor]:
        if self._reference is None:
            found, again = self._run(FP32).figures, self._run(FP32).figures
            if not found:
                raise ConfigError(
                    "no update was applied in fp32; the loop must call backward and step until step ends it, as in "
                    "`while True:`"
                )
            broken = [name for name, value in found.items() if not torch.isfinite(value).all()]
            if broken:
                raise ConfigError(f"{broken[0]} is not finite in fp32 either, so no arm can be compared with it")
            differing = [name for name, value in found.items() if not _same(again.get(name), value)]
            if differing:
                raise ConfigError(
                    f"{differing[0]} differs between two runs in fp32; begin from the same weights and batches in each "
                    "call, and draw random numbers from torch only, which is seeded before"
                )
            self._reference = {name: value for name, value in found.items() if name not in self._shown}
        return self._reference

    def _captured(self, arm: Arm) -> Capture:
        """Return what an arm gives.

        Raises:
            DoesNotHold: its step raised, or applied no update.
        """
        __tracebackhide__ = True
        kept: list[Capture] = []
        try:
            captured = self._run(arm, kept=kept)
        except AmpCompareError:
            raise
        except Exception as error:
            where = _line_of(error)
            module = kept[0].modules[-1] if kept and kept[0].modules else ""
            place = " ".join(filter(None, [f"in {module}" if module else "", f"({where})" if where else ""]))
            text = printable(f"{type(error).__name__}: {error}", 600)
            raise DoesNotHold(f"{arm} does not hold: the step raises {place}: {text}", str(arm)) from error
        return captured

    def _run(self, arm: Arm, rounding: Rounding | None = None, kept: list[Capture] | None = None) -> Capture:
        """Return the figures of a run.

        Args:
            kept: gets the precision before the run, whose state is of use if it raises.
        """
        __tracebackhide__ = True
        with trained_under(arm, self._conditions) as precision:
            captured = Capture(precision, self._conditions.steps, rounding)
            if kept is not None:
                kept.append(captured)
            with suppress(Enough):
                self._loop(captured)
        return captured

    def _figures(self, captured: Capture, reference: Mapping[str, Tensor]) -> list[Figure]:
        half = captured.half_dtype
        if self._rtol == "auto":
            unit = rounding_unit(half)
            if unit not in self._rounded:
                draws = (Rounding(unit, seed) for seed in range(DRAWS))
                self._rounded[unit] = [self._run(FP32, rounding).figures for rounding in draws]
            allowed = tolerances(self._rounded[unit], reference, half)
        else:
            allowed = dict.fromkeys(reference, float(self._rtol))
        errors = errors_of(captured.figures, reference)
        return [Figure(name, errors[name], allowed[name], captured.dtypes.get(name, "none")) for name in reference]

    def _diagnosed(self, arm: Arm) -> Diagnosis:
        """Return the diagnosis of the watched steps, with a tested cure where there is a fault."""
        conditions = self._conditions
        observation = measure(self._loop, arm, conditions)
        found = report_of(observation, arm, reference=conditions.reference)
        found = found.model_copy(update={"faults": self._faults(observation)})
        found = found.model_copy(update={"verdict": verdict_of(arm, found)})
        if not self._cures:
            return found

        def tested(other: Arm, lines: Sequence[str]) -> Tested:
            seen = measure(self._loop, other, conditions, lines)
            return Tested(self._faults(seen), sorted(seen.functions))

        return with_cure(found, arm, tested, device_type=observation.device_type)

    def _faults(self, observation: Observation) -> list[Fault]:
        return [fault for fault in find_faults(observation) if self._has_steps or fault.kind not in OF_STEPS]


def _name_of(subject: Callable[..., Any]) -> str:
    return getattr(subject, "__name__", type(subject).__name__)


def _undoable(arm: Arm) -> Arm:
    """Return an arm whose patches of torch can be undone: for O1, ampcompare's own engine unless one is named."""
    if arm.options.get("opt_level") in PATCHING and "engine" not in arm.options:
        return Arm.parse(f"{arm},engine=compat")
    return arm


def _same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and torch.equal(one, other)


def _line_of(error: BaseException) -> str:
    """Return file:line of the innermost frame of the user's code in a traceback."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    for frame, line in reversed(frames):
        name = calling_line(frame)
        if name and name.rpartition(":")[0] and frame.f_code.co_filename.endswith(name.rpartition(":")[0]):
            return f"{name.rpartition(':')[0]}:{line}"
    return ""


def _message(arm: Arm, diagnosis: Diagnosis, figures: Sequence[Figure], islands: Sequence[str]) -> list[str]:
    far = sorted((figure for figure in figures if not figure.holds), key=lambda one: -one.error / one.tolerance)
    if diagnosis.faults:
        lines = [f"{arm} does not hold: {diagnosis.verdict.removeprefix(f'{arm}: ')}"]
        lines += [f"  into it: {printable(text, 200)}" for text in diagnosis.faults[0].inputs]
        if diagnosis.faults[0].chain:
            lines.append(f"  chain: {' > '.join(diagnosis.faults[0].chain)}")
    elif far:
        worst = far[0]
        lines = [
            f"{arm} does not hold: {worst.name} is {worst.error:.2g} of its size away from fp32, and "
            f"{worst.tolerance:.2g} is allowed{_where(diagnosis, worst)}"
        ]
    else:
        lines = [f"{arm} does not hold: {islands[0]}"]
    lines += [f"  island: {printable(text, 300)}" for text in islands]
    if far:
        rows = [[one.name, f"{one.error:.2g}", f"{one.tolerance:.2g}", one.dtype] for one in far[:MAX_ROWS]]
        lines += [
            f"  {line}"
            for line in tabulate(rows, ["too far", "error", "allowed", "dtype"], disable_numparse=True).splitlines()
        ]
        if len(far) > MAX_ROWS:
            lines.append(f"  and {len(far) - MAX_ROWS} more")
    if diagnosis.cure is not None:
        lines += ["  cure (tested):", *(f"    {line}" for line in diagnosis.cure.code.splitlines())]
    return lines


def _where(diagnosis: Diagnosis, figure: Figure) -> str:
    """Return the first place whose result is as far from fp32 as a figure may be, where one was seen."""
    found: PlaceReport | None = next(
        (report for report in diagnosis.places if (report.error or 0.0) > figure.tolerance), None
    )
    if found is None:
        return ""
    call = f" ({found.place.where})" if found.place.where else ""
    return f"; the first result that far is that of {found.place.name}{call}, {found.error:.2g}"
