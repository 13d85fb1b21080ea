"""One step of a prepared model, watched. Runs in a child process: O1 patches torch for the life of a process."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.base.tensors.products import dtype_name
from ampcompare.base.tensors.tree import tensors_in_value
from ampcompare.settings.config import RunConfig
from ampcompare.settings.examination import return_user_errors
from ampcompare.tasks.task import make_task
from ampcompare.training.assemble import TrainingAssembly, assemble_run
from ampcompare.training.precision.base import make_precision, owned_params
from ampcompare.training.precision.cpu_half import choose_cpu_half_mode_and_context
from ampcompare.training.process.process_group import process_group_for_cell
from ampcompare.training.process.switches import configure_examining_process

MAX_STEPS = 30  # a dynamic scale that begins too high is halved at each


@return_user_errors
def explain_step(config: dict[str, Any]) -> dict[str, Any]:
    """Prepare the model of a configuration, make one step and return what was seen, as plain data."""
    settings, device = configure_examining_process(config)
    with process_group_for_cell(settings):
        return _observe_step_on_device(settings, device)


def _observe_step_on_device(config: RunConfig, device: torch.device) -> dict[str, Any]:
    precision = make_precision(config.arm, device=str(device), autocast_lists=config.autocast_lists)
    task = make_task(config.recipe)
    assembly = assemble_run(config.recipe, task, precision, device)
    models, optimizers = assembly.models, assembly.optimizers
    model = models[0] if len(models) == 1 else nn.ModuleList(models)
    batch = next(iter(task.data.train_batches(0, config.recipe.batch_size, device=device)))
    how, context = choose_cpu_half_mode_and_context(
        config.cpu_half, precision.half_dtype, device, config.autocast_lists
    )
    watch = _ModuleTypeTracer(model)
    with context:
        scales_before = precision.loss_scales()
        with watch:
            loss = _run_passes_returning_first_loss(assembly, batch)
        masters = _master_weights(model, optimizers)  # which Apex makes in the first pass
        gradients = _sizes_of_gradients(model.parameters())  # before the step, which may free them
        master_gradients = _sizes_of_gradients(masters)
        skipped = _step_until_applied(assembly, batch)
    counts = {
        "parameters": _sizes_by_dtype(model.parameters()),
        "buffers": _sizes_by_dtype(model.buffers()),
        "gradients": gradients,
        "master_weights": _sizes_by_dtype(masters),
        "master_gradients": master_gradients,
        "optimizer_state": _sizes_by_dtype(_optimizer_states(optimizers)),
    }
    parameters = sum(param.numel() for param in model.parameters())
    held = {name: sum(part["bytes"] for part in parts.values()) for name, parts in counts.items()}
    return {
        "arch": config.recipe.model.arch,
        "data": config.recipe.data.name,
        "optimizer": config.recipe.optimizer.name,
        "batch_shape": list(next(tensors_in_value(batch)).shape),
        "device": str(device),
        "half": f"{precision.emulated} emulated" if precision.emulated else how,
        "notes": list(precision.notes),
        "engine": None if precision.engine is None else precision.engine.name,
        "engine_version": None if precision.engine is None else precision.engine.version,
        "kept_fp32": list(precision.kept_fp32),
        "modules": watch.module_rows(),
        "loss": {"dtype": dtype_name(loss.dtype), "value": float(loss.detach())},
        "loss_scale": {
            "before": list(scales_before),
            "after": list(precision.loss_scales()),
            "skipped_steps": skipped,
        },
        "counts": counts,
        "num_parameters": parameters,
        "bytes": {**held, "total": sum(held.values())},
        "bytes_per_parameter": sum(held.values()) / parameters if parameters else None,
    }


def _master_weights(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Return the parameters that optimizers step and that are none of the model's own."""
    own = {id(param) for param in model.parameters()}
    return [param for each in optimizers for param in owned_params(each) if id(param) not in own]


def _optimizer_states(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from tensors_in_value(state)


def _step_until_applied(assembly: TrainingAssembly, batch: Any) -> int:
    """Take a step from the gradients that are there; return how many were skipped before one was applied."""
    skipped = 0
    while not all(assembly.precision.step(*assembly.optimizers).applied) and skipped < MAX_STEPS:
        skipped += 1
        for optimizer in assembly.optimizers:
            optimizer.zero_grad()
        _run_passes_returning_first_loss(assembly, batch)
    return skipped


def _run_passes_returning_first_loss(assembly: TrainingAssembly, batch: Any) -> Tensor:
    """Make forward and backward passes of each phase, without the steps in between; return the first loss."""
    losses = []
    for loss_id, phase in enumerate(assembly.task.phases(len(assembly.optimizers))):
        with assembly.precision.autocast():
            loss = phase.loss(assembly.models, batch)
        stepped = [assembly.optimizers[place] for place in phase.optimizers]
        assembly.precision.backward(loss, stepped, loss_id=loss_id)
        losses.append(loss)
    return losses[0]


class _ModuleTypeTracer:
    """Hooks on the model and on each module that has its own parameters or no children."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            is_leaf = next(module.children(), None) is None
            has_params = next(module.parameters(recurse=False), None) is not None
            if not name or is_leaf or has_params:
                self.modules[name] = module
        self.inputs: dict[str, list[str]] = {}
        self.outputs: dict[str, list[str]] = {}
        self.order: list[str] = []
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self.modules.items():
            self.handles.append(module.register_forward_hook(self._make_type_hook(name), with_kwargs=True))

    def __exit__(self, *exc: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _make_type_hook(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if name not in self.inputs:
                self.order.append(name)
            _add_floating_types(self.inputs.setdefault(name, []), [args, kwargs])
            _add_floating_types(self.outputs.setdefault(name, []), output)

        return note

    def module_rows(self) -> list[dict[str, Any]]:
        """Return a row per module: those that ran in the order of their first end, the model itself last."""
        silent = [name for name in self.modules if name not in self.inputs]
        rows = []
        for name in [*(name for name in self.order if name), *(name for name in silent if name), ""]:
            module = self.modules[name]
            owned = list(module.parameters(recurse=not name))
            weights: list[str] = []
            _add_floating_types(weights, owned)
            rows.append(
                {
                    "module": name or "(model)",
                    "type": type(module).__name__,
                    "parameters": sum(param.numel() for param in owned),
                    "weights": weights,
                    "inputs": self.inputs.get(name, []),
                    "outputs": self.outputs.get(name, []),
                    "ran": name in self.inputs,
                }
            )
        return rows


def _add_floating_types(names: list[str], value: Any) -> None:
    """Add to `names` each floating type in `value` that is not there yet."""
    for tensor in tensors_in_value(value):
        if tensor.is_floating_point() and dtype_name(tensor.dtype) not in names:
            names.append(dtype_name(tensor.dtype))


def _sizes_of_gradients(params: Iterable[Tensor]) -> dict[str, dict[str, int]]:
    return _sizes_by_dtype(param.grad for param in params if param.grad is not None)


def _inner_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor of another class holds, such as codes and scales of 8 bits; else itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    held = [getattr(tensor, name) for name in flatten()[0]]
    for part in held:
        if isinstance(part, Tensor):  # a shard holds its mesh of devices too
            yield from _inner_tensors(part)


def _sizes_by_dtype(tensors: Iterable[Tensor]) -> dict[str, dict[str, int]]:
    """Return tensors, elements and bytes of each dtype."""
    found: dict[str, dict[str, int]] = {}
    for tensor in chain.from_iterable(map(_inner_tensors, tensors)):
        part = found.setdefault(dtype_name(tensor.dtype), {"tensors": 0, "elements": 0, "bytes": 0})
        part["tensors"] += 1
        part["elements"] += tensor.numel()
        part["bytes"] += tensor.numel() * tensor.element_size()
    return found
