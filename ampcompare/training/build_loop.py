"""From an assembled run to the loop that trains it."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampcompare.base.errors import EnvironmentUnfit, UnsupportedCombination
from ampcompare.base.tensors.tree import map_tensors_in_tree, tensors_in_value
from ampcompare.settings.recipe import Recipe
from ampcompare.tasks.task import LossOf, Phase
from ampcompare.training.assemble import TrainingAssembly
from ampcompare.training.loop import Loop, update
from ampcompare.training.meters import make_clock
from ampcompare.training.parallel.replication import Parallel
from ampcompare.training.precision.base import Precision, StepOutcome

WARM_UP = 3  # updates: the first ones create lazy state and choose kernels
T = TypeVar("T")


def build_training_loop(
    recipe: Recipe, assembly: TrainingAssembly, precision: Precision, *, drain_every: int
) -> Loop:
    """Return the loop of a run.

    Args:
        recipe: for accumulation, clipping and CUDA graphs.
        assembly: what is trained.
        precision: the assembly's own, or a wrapper around it that watches.
        drain_every: steps whose losses stay on the device until they are read together.
    """
    task, ranks = assembly.task, assembly.ranks
    phases = task.phases(len(assembly.optimizers))
    return Loop(
        models=assembly.models,
        optimizers=assembly.optimizers,
        precision=precision,
        parallel=assembly.parallel,
        loss_of=phases[0].loss,
        clock=make_clock(assembly.device),
        num_losses=len(phases),
        accumulation=recipe.grad_accum_steps,
        clip_norm=recipe.clip_grad,
        schedule=assembly.schedule,
        base_lrs=assembly.base_lrs,
        drain_every=drain_every,
        channels_last=recipe.channels_last,
        mean=ranks.mean if ranks.size > 1 else None,
        split=task.split,
        to_channels_last=task.channels_last,
        update=_make_update_function(phases, assembly, in_cuda_graph=recipe.cuda_graph),
        after_step=() if assembly.average is None else (assembly.average.update,),
    )


def _make_update_function(
    phases: Sequence[Phase], assembly: TrainingAssembly, *, in_cuda_graph: bool
) -> Callable[..., Any]:
    """Return what makes an update: all optimizers at once, or phase by phase; or a CUDA graph of it."""
    if len(phases) > 1:
        if in_cuda_graph:
            raise UnsupportedCombination(
                f"cuda_graph captures one step, but this task makes {len(phases)} in an update; leave out --cuda-graph"
            )
        return _PhasedUpdate(phases)
    if not in_cuda_graph:
        return update
    return make_step_graph(assembly.device, assembly.precision, assembly.optimizers)


Result = tuple[list[Tensor], Tensor | None, StepOutcome]
Update = Callable[..., Result]


class _CudaGraphRecorder:
    """Records the kernels of a piece of code by `torch.cuda.CUDAGraph`, and launches them again on the same memory.

    Capturing requires a separate stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._graph = torch.cuda.CUDAGraph()

    def warm_up_code(self, code: Callable[[], T]) -> T:
        """Run `code` as it will be recorded."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = code()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def record_kernels(self, code: Callable[[], T]) -> T:
        """Record the kernels of `code`, which need not run; return what it returned."""
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream):
            return code()

    def replay_kernels(self) -> None:
        self._graph.replay()


class StepGraph:
    """Replaces `update`: runs a few updates eagerly, records one, and replays it from then on.

    A batch of another shape, such as the last one of an epoch, is trained on without the graph. Losses, norms and
    outcomes are copied out of the memory of the graph, because the next launch overwrites it.
    """

    def __init__(self, update: Update, recorder: _CudaGraphRecorder) -> None:
        self._update = update
        self._recorder = recorder
        self._warm_ups = 0
        self._shapes: list[Any] = []
        self._inputs: Any = None
        self._losses: list[Tensor] = []
        self._norm: Tensor | None = None

    def __call__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        precision: Precision,
        parallel: Parallel,
        loss_of: LossOf,
        microbatches: Sequence[Any],
        clip_norm: float | None = None,
    ) -> Result:
        """Make one update; see `ampcompare.training.loop.update`."""
        shapes = [(part.shape, part.stride(), part.dtype) for part in tensors_in_value(list(microbatches))]
        arguments = (models, optimizers, precision, parallel, loss_of)
        if self._inputs is None:
            self._shapes = self._shapes or shapes
            if self._warm_ups < WARM_UP or shapes != self._shapes:
                self._warm_ups += shapes == self._shapes
                return self._recorder.warm_up_code(lambda: self._update(*arguments, microbatches, clip_norm))
            self._record_update(arguments, microbatches, clip_norm)
        elif shapes != self._shapes:
            return self._update(*arguments, microbatches, clip_norm)
        assert self._inputs is not None
        for target, part in zip(
            tensors_in_value(self._inputs), tensors_in_value(list(microbatches)), strict=True
        ):
            target.copy_(part, non_blocking=True)
        self._recorder.replay_kernels()
        norm = None if self._norm is None else self._norm.clone()
        return [loss.clone() for loss in self._losses], norm, precision.replayed_outcome()

    def _record_update(
        self, arguments: tuple[Any, ...], microbatches: Sequence[Any], clip_norm: float | None
    ) -> None:
        _, optimizers, precision, _, _ = arguments
        inputs = self._inputs = map_tensors_in_tree(list(microbatches), Tensor.clone)
        # A gradient that exists now would be read by every replay, from memory that is freed.
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

        def run_update() -> tuple[list[Tensor], Tensor | None]:
            with precision.capturing():
                losses, norm, _ = self._update(*arguments, inputs, clip_norm)
            return losses, norm

        try:
            self._losses, self._norm = self._recorder.record_kernels(run_update)
        except RuntimeError as error:
            first = str(error).strip().partition("\n")[0]
            raise UnsupportedCombination(
                f"cuda_graph: this step cannot be captured, because something in it waits for the device: {first}; "
                "leave out --cuda-graph"
            ) from error


def make_step_graph(device: torch.device, precision: Precision, optimizers: Sequence[Optimizer]) -> StepGraph:
    """Return what makes updates by a CUDA graph, with the learning rates on the device; raise where that is refused."""
    refuse_cuda_graph(device, precision, optimizers)
    move_rates_to_device(optimizers, device)
    return StepGraph(update, _CudaGraphRecorder(device))


def refuse_cuda_graph(device: torch.device, precision: Precision, optimizers: Sequence[Optimizer]) -> None:
    """Raise if a step cannot be recorded as a CUDA graph."""
    if device.type != "cuda":
        raise EnvironmentUnfit(
            f"--cuda-graph captures kernels of a CUDA device, but this run is on {device}; leave it out"
        )
    for optimizer in optimizers:
        if not all(group.get("fused") for group in optimizer.param_groups):
            raise UnsupportedCombination(
                f"cuda_graph: {type(optimizer).__name__} keeps the learning rate and step counts on the host, "
                "where a graph cannot read them; use --optimizer-implementation fused"
            )
    reason = precision.why_no_cuda_graph(optimizers)
    if reason is not None:
        raise UnsupportedCombination(f"cuda_graph: {reason}; leave out --cuda-graph")


def move_rates_to_device(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Put the learning rate of each group into an fp32 tensor, which a schedule fills and a graph reads."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.full((), float(group["lr"]), dtype=torch.float32, device=device)


class _PhasedUpdate:
    """Replaces `update` for a task with several phases; each has a loss scaler where the arm has one for each loss."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        self.phases = phases

    def __call__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        precision: Precision,
        parallel: Parallel,
        loss_of: LossOf,
        microbatches: Sequence[Any],
        clip_norm: float | None = None,
    ) -> tuple[list[Tensor], Tensor | None, StepOutcome]:
        """Make one update; see `ampcompare.training.loop.update`. `loss_of` is not used: each phase has its own."""
        losses = []
        norms = []
        outcomes = []
        for loss_id, phase in enumerate(self.phases):
            stepped = [optimizers[place] for place in phase.optimizers]
            some, norm, outcome = update(
                models, stepped, precision, parallel, phase.loss, microbatches, clip_norm, loss_id
            )
            # A loss may reach the models of other phases too; what it leaves there is not for their optimizers.
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses += some
            norms += [] if norm is None else [norm]
            outcomes.append(outcome)
        return (
            losses,
            torch.stack(norms).amax() if norms else None,
            _OutcomeOfPhases(outcomes, self.phases, len(optimizers)),
        )


class _OutcomeOfPhases(StepOutcome):
    """The outcome of an update in phases."""

    __slots__ = ("_count", "_outcomes", "_phases")

    def __init__(self, outcomes: Sequence[StepOutcome], phases: Sequence[Phase], count: int) -> None:
        self._outcomes = outcomes
        self._phases = phases
        self._count = count

    @property
    def applied(self) -> tuple[bool, ...]:
        applied = [True] * self._count
        for outcome, phase in zip(self._outcomes, self._phases, strict=True):
            for place, one in zip(phase.optimizers, outcome.applied, strict=True):
                applied[place] = applied[place] and one
        return tuple(applied)

    @property
    def loss_scales(self) -> tuple[float, ...]:
        return self._outcomes[-1].loss_scales
