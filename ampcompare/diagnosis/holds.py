"""The assertion `holds`: one run in fp32, some with added rounding, and for each arm one run and a diagnosis."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from ampcompare.backends.arm import Arm
from ampcompare.base.errors import AmpCompareError, ConfigError
from ampcompare.base.formatting import printable_line
from ampcompare.diagnosis.diagnose import diagnose_loop
from ampcompare.diagnosis.findings import HARM, HARM_IN_BF16, NEGLIGIBLE
from ampcompare.diagnosis.loops import Loop, LoopConditions, arm_precision_isolated
from ampcompare.diagnosis.observation import relative_error
from ampcompare.diagnosis.remedies import fault_and_cure_sentence
from ampcompare.diagnosis.sites import location_text_of_frame
from ampcompare.diagnosis.step_watch import MAX_SKIPPED
from ampcompare.diagnosis.watched_precision import StepsDone
from ampcompare.results.records.diagnosis import Diagnosis, FaultKind, PlaceReport
from ampcompare.training.precision.base import Precision, PrecisionWrapper, StepOutcome, owned_params
from ampcompare.training.process.device import resolve_device

DEFAULT_ARMS = ("bf16", "fp16", "O2")
FP32 = Arm.parse("fp32")
DRAWS = 3
MAX_ROWS = 10
# What an optimizer step loses is no property of a module, whose weights are left as they are.
OF_STEPS: Sequence[FaultKind] = ("lost updates", "update")
PATCHING = ("O1", "O4")
FACTOR = 4.0  # times the largest deviation that one rounding of each weight and each module's result makes
FLOOR = 8.0  # roundings at least
LEAST = 1e-6  # share of the largest gradient below which one counts as zero
GRADIENT = "gradient of "
Inputs = Sequence[Any] | Mapping[str, Any]


def holds(
    subject: Callable[..., Any],
    arms: Sequence[Arm | str] | Arm | str = DEFAULT_ARMS,
    *,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Callable[[Any], Any] | None = None,
    rtol: float | Literal["auto"] = "auto",
    steps: int = 1,
    seed: int = 0,
    device: str = "cpu",
    cures: bool = True,
) -> list[Held]:
    """Assert that a module, a loss or a training step gives under each arm what it gives in fp32.

    Compared are outputs, loss and gradients of the first update that is applied. Every operation of all steps is
    watched for overflow, underflow and lost updates, as `ampcompare.diagnose` does.

    Args:
        subject: with `inputs`, a module, of which a copy is trained, or a function of tensors such as a loss. Without,
            a training loop as for `ampcompare.diagnose`: it gets a precision, calls `prepare` once, and then
            `backward` and `step`, which ends the loop after the last step. It is called several times, and must begin
            from the same weights and batches each time; torch is seeded before.
        arms: texts such as "bf16", "fp16", "O2" or "apex:O1,loss_scale=128", or `Arm` objects.
        inputs: positional arguments of the subject, or a mapping of keyword arguments. The floating inputs of a
            function, or of a module without weights to train, reach it in the 16-bit type of the arm, as the results
            of a layer do, and get gradients.
        loss: makes the loss of the output of a module or function; by default a fixed random weighting of it.
        rtol: relative error that each figure may have; "auto": what rounding explains, see docs/testing.md.
        steps: updates that are watched for faults.
        seed: of torch before each run.
        device: such as "cpu" or "cuda"; 16-bit products are emulated on a CPU, as tensor cores compute them.
        cures: search what removes a fault, by up to 12 further runs, and name it in the message.

    Returns:
        What was measured, for each arm.

    Raises:
        DoesNotHold: under an arm it raises, overflows, loses gradients or is further from fp32 than the tolerance.
        ConfigError: an arm that does not exist, a loop that makes no update or differs from run to run, or that is not
            finite in fp32.
        EnvironmentUnfit: this machine lacks something that an arm needs.
    """
    __tracebackhide__ = True
    if rtol != "auto" and not (isinstance(rtol, (int, float)) and rtol > 0):
        raise ConfigError(f'rtol must be "auto" or a number above 0, not {rtol!r}')
    if steps < 1:
        raise ConfigError(f"steps must be at least 1, not {steps}")
    if inputs is None and isinstance(subject, nn.Module):
        raise ConfigError("a module is run on inputs; pass inputs=(tensor, ...)")
    if inputs is None and loss is not None:
        raise ConfigError("loss is of a module or function with inputs; a training loop has its own")
    conditions = LoopConditions(steps=steps, device=str(resolve_device(device)), seed=seed)
    check = _LoopComparedWithFp32(
        subject if inputs is None else _make_loop_over_subject(subject, inputs, loss, conditions.device),
        conditions,
        rtol=rtol,
        cures=cures,
        has_steps=inputs is None,
        has_own_loss=inputs is not None and loss is None,
        name=""
        if inputs is None or loss is not None
        else getattr(subject, "__name__", type(subject).__name__),
    )
    held = []
    for arm in [arms] if isinstance(arms, str) or not isinstance(arms, Sequence) else arms:
        held.append(check.check_arm(arm))  # a comprehension would be one more frame in tracebacks
    return held


@dataclass(frozen=True)
class Figure:
    """One result that an arm was compared in: an output, the loss, or the gradient of a parameter.

    Attributes:
        name: such as "output", "loss" or "gradient of head.weight".
        error: norm of the difference to fp32, relative to the norm in fp32; inf where it is not finite.
        tolerance: that the error may have.
        dtype: in the arm.
    """

    name: str
    error: float
    tolerance: float
    dtype: str

    @property
    def holds(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Held:
    """An arm that holds.

    Attributes:
        arm: in its canonical form.
        figures: of the first update that was applied.
        skipped: steps that were skipped as gradients overflowed.
    """

    arm: str
    figures: tuple[Figure, ...]
    skipped: int = 0

    @property
    def worst(self) -> Figure:
        """The figure that uses most of its tolerance."""
        return max(self.figures, key=lambda figure: figure.error / figure.tolerance)


class DoesNotHold(AssertionError):
    """A step does not hold under an arm; the message says where it breaks and what cures it.

    Args:
        message: in one line or several.

    Attributes:
        arm: in its canonical form.
        figures: all that were compared; empty where the step raised.
        diagnosis: None where the step raised.
    """

    def __init__(
        self, message: str, arm: str, figures: Sequence[Figure] = (), diagnosis: Diagnosis | None = None
    ) -> None:
        super().__init__(message)
        self.arm = arm
        self.figures = tuple(figures)
        self.diagnosis = diagnosis


@dataclass
class _LoopComparedWithFp32:
    """A training loop, and what it gives in fp32."""

    loop: Loop
    conditions: LoopConditions
    rtol: float | Literal["auto"]
    cures: bool
    has_steps: bool  # its optimizer steps count; else weights are left as they are
    has_own_loss: bool  # its loss is a random weighting, and no result
    name: str  # of what runs outside of submodules; "" for nothing
    reference: dict[str, Tensor] = field(default_factory=dict)
    # figures with added rounding, by unit
    rounded: dict[float, list[dict[str, Tensor]]] = field(default_factory=dict)

    def check_arm(self, arm: Arm | str) -> Held:
        __tracebackhide__ = True
        arm = _arm_with_undoable_patches(Arm.parse(arm) if isinstance(arm, str) else arm)
        reference = self._train_and_keep_fp32_figures()
        captured = self._run_loop(arm)
        figures = self._compared_figures(captured, reference)
        diagnosis = diagnose_loop(
            self.loop, arm, self.conditions, cures=self.cures, left_out=() if self.has_steps else OF_STEPS
        )
        far = [figure for figure in figures if not figure.holds]
        if diagnosis.faults or far:
            text = "\n".join(_failure_message_lines(arm, diagnosis, far))
            if self.name:  # what runs in no module inside of the subject runs in the subject itself
                text = text.replace("outside of submodules", f"of {self.name}")
            raise DoesNotHold(text, str(arm), figures, diagnosis)
        return Held(str(arm), tuple(figures), captured.skipped)

    def _train_and_keep_fp32_figures(self) -> dict[str, Tensor]:
        if not self.reference:
            found, again = self._run_loop(FP32).figures, self._run_loop(FP32).figures
            if not found:
                raise ConfigError(
                    "no update was applied in fp32; the loop must call backward and step until step ends it, as in "
                    "`while True:`"
                )
            for name, value in found.items():
                if not torch.isfinite(value).all():
                    raise ConfigError(
                        f"{name} is not finite in fp32 either, so no arm can be compared with it"
                    )
            for name, value in found.items():
                if name not in again or not torch.equal(again[name], value):
                    raise ConfigError(
                        f"{name} differs between two runs in fp32; begin from the same weights and batches in each "
                        "call, and draw random numbers from torch only, which is seeded before"
                    )
            self.reference = {
                name: value for name, value in found.items() if name != "loss" or not self.has_own_loss
            }
        return self.reference

    def _run_loop(self, arm: Arm, rounding: _RoundingNoise | None = None) -> _FigureCapture:
        __tracebackhide__ = True
        with arm_precision_isolated(arm, self.conditions) as precision:
            captured = _FigureCapture(precision, self.conditions.steps, rounding)
            try:
                self.loop(captured)
            except StepsDone:
                pass
            except Exception as error:
                if arm == FP32 or isinstance(error, AmpCompareError):
                    raise
                text = printable_line(f"{type(error).__name__}: {error}", 600)
                where = _place_of_error(error, captured.modules)
                raise DoesNotHold(
                    f"{arm} does not hold: the step raises {where}: {text}", str(arm)
                ) from error
        return captured

    def _compared_figures(self, captured: _FigureCapture, reference: Mapping[str, Tensor]) -> list[Figure]:
        half = captured.half_dtype
        if self.rtol == "auto":
            unit = _largest_rounding_error(half)
            if unit not in self.rounded:
                draws = (_RoundingNoise(unit, seed) for seed in range(DRAWS))
                self.rounded[unit] = [self._run_loop(FP32, rounding).figures for rounding in draws]
            allowed = tolerances_by_figure(self.rounded[unit], reference, half)
        else:
            allowed = dict.fromkeys(reference, float(self.rtol))
        errors = _relative_errors_of(captured.figures, reference)
        return [
            Figure(name, errors[name], allowed[name], captured.dtypes.get(name, "none")) for name in reference
        ]


def _arm_with_undoable_patches(arm: Arm) -> Arm:
    """Return an arm whose patches of torch can be undone: for O1, ampcompare's own engine unless one is named."""
    if arm.options.get("opt_level") in PATCHING and "engine" not in arm.options:
        return Arm.parse(f"{arm},engine=compat")
    return arm


def _place_of_error(error: BaseException, modules: Mapping[int, str]) -> str:
    """Return the innermost module of a traceback, and file:line of the innermost frame of the user's code."""
    module = line = ""
    trace = error.__traceback__
    while trace is not None:
        module = modules.get(id(trace.tb_frame.f_locals.get("self")), module)
        if shown := location_text_of_frame(trace.tb_frame):
            line = f"{shown.rpartition(':')[0]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return " ".join(filter(None, [f"in {module}" if module else "", f"({line})" if line else ""]))


def _failure_message_lines(arm: Arm, diagnosis: Diagnosis, far: Sequence[Figure]) -> list[str]:
    far = sorted(far, key=lambda one: -one.error / one.tolerance)
    if diagnosis.faults:
        lines = [f"{arm} does not hold: {fault_and_cure_sentence(diagnosis)}"]
        lines += [f"  into it: {printable_line(text, 200)}" for text in diagnosis.faults[0].inputs]
        if diagnosis.faults[0].chain:
            lines.append(f"  chain: {' > '.join(diagnosis.faults[0].chain)}")
    else:
        worst = far[0]
        lines = [
            f"{arm} does not hold: {worst.name} is {worst.error:.2g} of its size away from fp32, and "
            f"{worst.tolerance:.2g} is allowed{_first_bad_place(diagnosis, worst)}"
        ]
    if far:
        rows = [[one.name, f"{one.error:.2g}", f"{one.tolerance:.2g}", one.dtype] for one in far[:MAX_ROWS]]
        lines += [
            f"  {line}"
            for line in tabulate(
                rows, ["too far", "error", "allowed", "dtype"], disable_numparse=True
            ).splitlines()
        ]
        if len(far) > MAX_ROWS:
            lines.append(f"  and {len(far) - MAX_ROWS} more")
    if diagnosis.cure is not None:
        lines += ["  cure (tested):", *(f"    {line}" for line in diagnosis.cure.code.splitlines())]
    return lines


def _first_bad_place(diagnosis: Diagnosis, figure: Figure) -> str:
    """Return the first place whose result is as far from fp32 as a figure may be, where one was seen."""
    found: PlaceReport | None = next(
        (report for report in diagnosis.places if (report.error or 0.0) > figure.tolerance), None
    )
    if found is None:
        return ""
    call = f" ({found.place.where})" if found.place.where else ""
    return f"; the first result that far is that of {found.place.name}{call}, {found.error:.2g}"


class _RoundingNoise:
    """Changes weights, inputs and the result of each module by one unit of rounding, up or down at random.

    What a step then deviates from itself is what rounding explains: the error of a perfect implementation of each
    module in a type of this precision and of any range. Torch's own random numbers are not used.
    """

    def __init__(self, unit: float, seed: int) -> None:
        self._unit = unit
        self._draws = torch.Generator().manual_seed(seed)

    def value_with_noise(self, value: Any) -> Any:
        return tree_map(self._tensor_with_noise, value)

    def _tensor_with_noise(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        up = torch.randint(2, value.shape, generator=self._draws).to(value.device) * 2 - 1
        return value * (1 + self._unit * up).to(value.dtype)

    def follow_models(self, models: Sequence[nn.Module]) -> None:
        """Change the weights of models, and from now on their inputs and the results of their innermost modules."""
        with torch.no_grad():
            for model in models:
                for param in model.parameters():
                    if param.is_floating_point():
                        param.copy_(self._tensor_with_noise(param))
                model.register_forward_pre_hook(
                    lambda _, args, kwargs: self.value_with_noise((args, kwargs)), with_kwargs=True
                )
                for module in model.modules():
                    if not any(module.children()):
                        module.register_forward_hook(lambda _, args, output: self.value_with_noise(output))


class _FigureCapture(PrecisionWrapper):
    """Keeps loss, outputs and gradients of the first applied update, and raises `StepsDone` after the last one."""

    def __init__(self, inner: Precision, steps: int, rounding: _RoundingNoise | None = None) -> None:
        super().__init__(inner)
        self.figures: dict[str, Tensor] = {}
        self.dtypes: dict[str, str] = {}
        self.modules: dict[int, str] = {}
        self.skipped = 0
        self._steps = steps
        self._rounding = rounding
        self._made = 0
        self._found: dict[str, Tensor] = {}  # of the present step
        self._names: dict[int, str] = {}
        self._params: list[list[str]] = []
        self._optimizers: list[Optimizer] = []

    def _prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ) -> tuple[list[nn.Module], list[Optimizer]]:
        prefixes = ["" if len(models) == 1 else f"{type(model).__name__}:" for model in models]
        for prefix, model in zip(prefixes, models, strict=True):
            self._names |= {id(param): f"{prefix}{name}" for name, param in model.named_parameters()}
        for number, optimizer in enumerate(optimizers):
            params = owned_params(optimizer)
            self._params.append(
                [
                    self._names.get(id(one), f"parameter {at} of optimizer {number}")
                    for at, one in enumerate(params)
                ]
            )
        if self._rounding is not None:
            self._rounding.follow_models(models)
        prepared, stepped = super()._prepare(models, optimizers)
        for prefix, model in zip(prefixes, prepared, strict=True):
            self._keep_outputs_of(prefix, model)
        self._optimizers = list(stepped)
        return prepared, stepped

    def _keep_outputs_of(self, prefix: str, model: nn.Module) -> None:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            for path, value in tree_flatten_with_path(output)[0]:
                if isinstance(value, Tensor) and value.is_floating_point():
                    self._found[f"{prefix}output{keystr(path)}"] = value.detach()

        self.modules |= {id(module): f"{prefix}{name}" for name, module in model.named_modules()}
        model.register_forward_hook(keep)

    def see_loss(self, loss: Tensor, loss_id: int) -> None:
        self._found[f"loss {loss_id}" if loss_id else "loss"] = loss.detach()

    def step(self, *optimizers: Optimizer) -> StepOutcome:
        if not self.figures:
            for optimizer in optimizers:
                self._keep_gradients(optimizer)
        outcome = self.inner.step(*optimizers)
        applied = all(outcome.applied)
        if applied and not self.figures:
            self.dtypes = {
                name: str(value.dtype).removeprefix("torch.") for name, value in self._found.items()
            }
            self.figures = {name: value.float().cpu() for name, value in self._found.items()}
        self._found = {}
        self._made += applied
        self.skipped += not applied
        if self._made >= self._steps or self.skipped > MAX_SKIPPED:
            raise StepsDone
        return outcome

    def _keep_gradients(self, optimizer: Optimizer) -> None:
        """Keep the gradients that an optimizer is about to use, divided by the loss scale."""
        place = next(at for at, one in enumerate(self._optimizers) if one is optimizer)
        params = self.inner.unscale(optimizer)
        for name, param in zip(self._params[place], params, strict=True):
            if param.grad is not None:
                grad = param.grad.to_dense() if param.grad.is_sparse else param.grad
                self._found[f"gradient of {name}"] = grad.detach().clone()


def _make_loop_over_subject(
    subject: Callable[..., Any], inputs: Inputs, loss: Callable[[Any], Any] | None, device: str
) -> Loop:
    """Return a loop that trains a copy of a module, or the inputs of a function, and leaves the weights as they are."""
    given: Any = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})

    def train(precision: Precision) -> None:
        args, kwargs = tree_map(
            lambda one: one.detach().clone().to(device) if isinstance(one, Tensor) else one, given
        )
        copied = copy.deepcopy(subject) if isinstance(subject, nn.Module) else subject
        if isinstance(copied, nn.Module) and any(param.requires_grad for param in copied.parameters()):
            model: nn.Module = copied.to(device)
        else:  # without weights to train a module is a function, whose inputs get gradients
            model = _FunctionModule(copied, args, kwargs, precision.half_dtype).to(device)
            args, kwargs = (), {}
        params = [param for param in model.parameters() if param.requires_grad]
        # Without parameters there is nothing to update; an optimizer must have one all the same.
        if not params:
            model.register_parameter("_unused", nn.Parameter(torch.zeros(1, device=device)))
            params = list(model.parameters())
        # The weights stay, so that steps that a loss scale skips change nothing.
        (model,), (optimizer,) = precision.prepare([model], [torch.optim.SGD(params, lr=0.0)])
        while True:
            with precision.autocast():
                output = model(*args, **kwargs)
                result = randomly_weighted_mean(output) if loss is None else loss(output)
            if not result.requires_grad:
                raise ConfigError(
                    "neither a parameter nor a floating input has a gradient, so nothing can be compared"
                )
            precision.backward(result, [optimizer])
            precision.step(optimizer)
            optimizer.zero_grad()

    return train


def randomly_weighted_mean(output: Any) -> Tensor:
    """Return the mean of the floating results, each element with a random weight that is always the same."""
    draws = torch.Generator().manual_seed(0)
    total: Tensor | None = None
    for value in tree_leaves(output):
        if isinstance(value, Tensor) and value.is_floating_point():
            weights = torch.randn(value.shape, generator=draws).to(value.device)
            part = (value.float() * weights).mean()
            total = part if total is None else total + part
    if total is None:
        raise TypeError("the output has no floating tensor; pass loss=, a function of it")
    return total


class _FunctionModule(nn.Module):
    """A function whose floating arguments are parameters, cast as the results of a layer are."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self._function = function
        self._args, self._kwargs = dict(enumerate(args)), dict(kwargs)
        self._dtype = dtype
        for name, value in [*self._args.items(), *self._kwargs.items()]:
            if isinstance(value, Tensor) and value.is_floating_point():
                self.register_parameter(f"input_{name}", nn.Parameter(value))

    def forward(self) -> Any:
        args = [
            self._cast_parameter(self._parameters.get(f"input_{at}", value))
            for at, value in self._args.items()
        ]
        kwargs = {
            name: self._cast_parameter(self._parameters.get(f"input_{name}", one))
            for name, one in self._kwargs.items()
        }
        return self._function(*args, **kwargs)

    def _cast_parameter(self, value: Any) -> Any:
        return value.to(self._dtype) if self._dtype is not None and isinstance(value, nn.Parameter) else value


def _largest_rounding_error(half: torch.dtype | None) -> float:
    """Return the largest relative error of one rounding to a type; that of fp32 for none."""
    return torch.finfo(torch.float32 if half is None else half).eps / 2


def _relative_errors_of(figures: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the norm of the difference of each figure, relative to its norm in the reference.

    A gradient that is small within its module is measured against a tenth of the largest there: what sums that cancel
    leave is noise in any precision. A figure that is missing, not finite, or has another shape is infinitely far.
    """
    sizes = {name: _root_mean_square(value) for name, value in reference.items()}
    gradients = {name: size for name, size in sizes.items() if name.startswith(GRADIENT)}
    least = LEAST * max(gradients.values(), default=0.0)
    errors = {}
    for name, exact in reference.items():
        size = sizes[name]
        if name in gradients:
            siblings = (
                other
                for of, other in gradients.items()
                if _module_of_parameter_name(of) == _module_of_parameter_name(name)
            )
            size = max(size, NEGLIGIBLE * max(siblings), least)
        value = figures.get(name)
        errors[name] = (
            math.inf
            if value is None or value.shape != exact.shape
            else relative_error(_root_mean_square(value - exact), size)
        )
    return errors


def tolerances_by_figure(
    rounded_figures: Iterable[Mapping[str, Tensor]], reference: Mapping[str, Tensor], half: torch.dtype | None
) -> dict[str, float]:
    """Return the tolerance of each figure under "auto", from fp32 runs with `_RoundingNoise`, each of another seed.

    An error of half the size, or nine tenths in bf16, is never within it: there `diagnose` calls a gradient wrong.
    """
    found: Sequence[dict[str, float]] = [
        _relative_errors_of(figures, reference) for figures in rounded_figures
    ]
    most = HARM_IN_BF16 if half is torch.bfloat16 else HARM
    unit = _largest_rounding_error(half)
    return {name: min(most, FLOOR * unit + FACTOR * max(one[name] for one in found)) for name in reference}


def _module_of_parameter_name(name: str) -> str:
    return name.rpartition(".")[0]


def _root_mean_square(value: Tensor) -> float:
    return float(value.double().square().mean().sqrt()) if value.numel() else 0.0
