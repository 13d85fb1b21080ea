"""The order in which a run is assembled; no other module depends on it.

Seed, models (fp32, CPU), synchronized batch norm, device, optimizers, `Precision.prepare`, `Parallel.shard`, checkpoint
(if any), torch.compile, `Parallel.wrap`: Apex's documented order. SyncBN comes early so that keep_batchnorm_fp32 sees
it, shards after the casts of a backend and before state exists, and DDP last because it records dtypes.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from ampcompare.base.environment.packages import silenced_import
from ampcompare.base.errors import (
    BackendUnavailable,
    ConfigError,
    UnsupportedCombination,
    suggestion_text,
)
from ampcompare.base.tensors.skippable_step import make_step_skippable
from ampcompare.settings.config import ParallelConfig
from ampcompare.settings.optimizers import APEX, LIBRARIES, OWN_APEX, optimizer_class_path, require_optimizer
from ampcompare.settings.recipe import OWN_SETTINGS, OptimizerConfig, Recipe, ScheduleConfig
from ampcompare.tasks.data import seed_global_generators
from ampcompare.tasks.factory import resolve_factory
from ampcompare.tasks.task import Task
from ampcompare.training.checkpoint.capture import restore_training_state
from ampcompare.training.checkpoint.check_checkpoint import (
    Names,
    check_run_position,
    parameter_names_by_model,
)
from ampcompare.training.ema import ModelEma
from ampcompare.training.parallel.ranks import Communicator, require_equal_on_ranks, signature_by_parameter
from ampcompare.training.parallel.replication import (
    DDP,
    DP,
    FSDP,
    ApexDDP,
    Parallel,
    SingleProcess,
    apex_parallel_module,
    find_batch_norm_converter,
)
from ampcompare.training.precision.base import Precision, learning_rate_of, owned_params
from ampcompare.training.twin import perturb_weights

SETTINGS = ("momentum", "nesterov", "betas", "eps", "weight_decay")
DECAYS = ("norm_weight_decay", "bias_weight_decay")


def checkpoint_activations(task: Task, models: Sequence[nn.Module]) -> None:
    """Let the modules that the task names compute their activations again; only their inputs are kept."""
    modules = task.checkpointed_modules(models)
    if not modules:
        raise UnsupportedCombination(
            "--checkpoint-activations: this model has no repeated blocks to recompute; leave it out"
        )
    for module in modules:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)


def make_rate_factor(
    config: ScheduleConfig, *, steps_per_epoch: int, total_steps: int
) -> Callable[[int], float] | None:
    """Return the factor on the base learning rate at each step; None if it is always 1.

    torch's schedulers count calls, warn when a first step was skipped, and cost about 15 microseconds a step; a
    function of the step gives every arm the same rate at the same step, and resumes without state.
    """
    warmup = round(config.warmup_epochs * steps_per_epoch)
    if config.name == "constant" and warmup == 0:
        return None

    def rate_factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.name == "step":
            return float(config.gamma ** (step // (config.step_epochs * steps_per_epoch)))
        if config.name == "cosine":
            progress = (step - warmup) / max(1, total_steps - warmup)
            return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return 1.0

    return rate_factor


@dataclass
class TrainingAssembly:
    """Everything that one training loop needs."""

    task: Task
    models: list[nn.Module]  # as the loop calls them
    replicas: list[nn.Module]  # without their wrappers, whose calls would wait for other ranks
    optimizers: list[Optimizer]  # as `Precision.prepare` returned them
    precision: Precision
    parallel: Parallel
    device: torch.device
    schedule: Callable[[int], float] | None  # factor on the learning rates by step; None if they are constant
    base_lrs: list[list[float]]  # per optimizer and group, what the factor multiplies
    steps_per_epoch: int
    total_steps: int
    ranks: Communicator
    names: Names  # of the parameters that the optimizers hold
    average: ModelEma | None = None  # EMA of the weights, evaluated as well
    workers: int = 0  # data loader processes


def assemble_run(
    recipe: Recipe,
    task: Task,
    precision: Precision,
    device: torch.device,
    *,
    parallel: Parallel | None = None,
    workers: int = 0,
    ranks: Communicator | None = None,
    state: Mapping[str, Any] | None = None,
    is_twin: bool = False,
) -> TrainingAssembly:
    """Assemble a run from its seed, or from a checkpoint: equal recipes start from bitwise equal weights.

    Args:
        recipe: what is trained, with the seed.
        task: makes models, optimizers and data.
        precision: of the arm; prepares the models.
        device: of this rank.
        parallel: how ranks share the work; None for one process.
        workers: processes of the loader.
        ranks: of the run; None for one process.
        state: of a checkpoint that the run resumes from; None to begin.
        is_twin: each weight begins changed by one part in 512.

    Raises:
        RanksDiffer: ranks have built different models.
        CheckpointError: the checkpoint does not fit the run.
        PreparationError: the arm cannot prepare the models.
    """
    ranks, parallel = ranks or Communicator(), parallel or SingleProcess()
    torch.manual_seed(recipe.seed)
    seed_global_generators(recipe.seed)  # numpy and Python too: a user's model may draw from their generators
    built = _build_models(recipe, task, parallel, device)
    engine = precision.engine.name if precision.engine else None
    unprepared = task.make_optimizers(
        built, functools.partial(make_optimizer, recipe.optimizer, engine=engine)
    )
    if is_twin:
        perturb_weights(param for optimizer in unprepared for param in owned_params(optimizer))
    let_compile_record_torch_functions(recipe.compile)
    average = None if recipe.ema_decay is None else ModelEma(built, recipe.ema_decay)
    # Both before `prepare`, which may replace parameters by fp32 master weights.
    params = [param for optimizer in unprepared for param in owned_params(optimizer)]
    names = parameter_names_by_model(built, unprepared)
    precision.expect_losses(len(task.phases(len(unprepared))))
    replicas, optimizers = precision.prepare(built, unprepared)
    require_equal_on_ranks(
        ranks, "model", signature_by_parameter(replicas), "build the same model on every rank"
    )
    parallel.shard(replicas, optimizers)
    base_lrs = [[learning_rate_of(group) for group in optimizer.param_groups] for optimizer in optimizers]
    steps_per_epoch = task.data.num_batches(recipe.batch_size, ranks.size)
    total_steps = steps_per_epoch * recipe.epochs
    if recipe.max_steps is not None:
        total_steps = min(total_steps, recipe.max_steps)
    schedule = make_rate_factor(recipe.schedule, steps_per_epoch=steps_per_epoch, total_steps=total_steps)
    if state is not None:
        check_run_position(state["progress"], steps_per_epoch, total_steps)
        if average is not None:
            average.check_average_state(state["parts"]["average"])
        restore_training_state(state, replicas, optimizers, precision, names)
    if average is not None:
        average.follow(replicas, optimizers, params)
    models = [parallel.wrap(compile_model(model, recipe.compile)) for model in replicas]
    return TrainingAssembly(
        task=task,
        models=models,
        replicas=replicas,
        optimizers=optimizers,
        precision=precision,
        parallel=parallel,
        device=device,
        schedule=schedule,
        base_lrs=base_lrs,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        ranks=ranks,
        average=average,
        names=names,
        workers=workers,
    )


def _build_models(recipe: Recipe, task: Task, parallel: Parallel, device: torch.device) -> list[nn.Module]:
    """Return the models of a task on the device, with the batch norm and in the layout of a run."""
    built = [parallel.convert_batchnorm(model).to(device) for model in task.make_models()]
    if recipe.channels_last:
        built = [model.to(memory_format=torch.channels_last) for model in built]  # type: ignore[call-overload]
    if recipe.checkpoint_activations:
        checkpoint_activations(task, built)
    return built


def import_optimizer_factory(name: str, engine: str | None = None) -> Callable[..., Any]:
    """Import the class or function that builds an optimizer.

    The engine "nvidia" takes the optimizers of Apex from Apex itself.
    """
    require_optimizer(name)
    module, _, attribute = optimizer_class_path(name).partition(":")
    if module == OWN_APEX and engine == "nvidia":
        module = APEX
    package = module.partition(".")[0]
    if package not in ("torch", "apex", *LIBRARIES):
        return resolve_factory(f"{module}:{attribute}")
    try:
        with silenced_import():
            found = importlib.import_module(module)
    except Exception as error:  # a package built for another torch may raise anything
        raise BackendUnavailable(
            f"optimizer {name}: importing {module} failed: {type(error).__name__}: {error}"
        ) from error
    kinds = {key: value for key, value in vars(found).items() if _is_optimizer_subclass(value)}
    if attribute not in kinds:
        version = f"torch {torch.__version__}" if package == "torch" else f"this {package}"
        raise ConfigError(
            f"{version} has no optimizer {module}.{attribute}; {suggestion_text(attribute, kinds)}"
        )
    kind: Callable[..., Any] = kinds[attribute]
    return kind


def _is_optimizer_subclass(value: object) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    )


def optimizer_arguments(config: OptimizerConfig, factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments to call `factory` with, besides the parameters.

    A setting at its default is passed if the optimizer takes it, and left out otherwise; one that was given and is not
    taken is an error.
    """
    parameters = _parameters_of_factory(config.name, factory)
    given = {name for name in SETTINGS if _differs_from_default(config, name)}
    arguments: dict[str, Any] = {"lr": config.lr}
    for name in SETTINGS:
        value = getattr(config, name)
        if name in config.args:
            if name in given:
                raise ConfigError(
                    f"recipe.optimizer.{name} and args.{name} are the same; give only one of them"
                )
        elif name in parameters and _argument_fits_setting(value, parameters[name].default):
            arguments[name] = value
        elif name in given:
            _refuse_optimizer_setting(config.name, name, value, parameters)
    if "weight_decay" not in arguments:
        for name in DECAYS:
            if getattr(config, name):
                _refuse_optimizer_setting(config.name, name, getattr(config, name), parameters)
        if any(group.weight_decay for group in config.groups):
            _refuse_optimizer_setting(config.name, "groups.weight_decay", "set", parameters)
    arguments |= _implementation_argument(config, parameters)
    return {**arguments, **_arguments_without_setting(config, parameters)}


def _implementation_argument(
    config: OptimizerConfig, parameters: Mapping[str, inspect.Parameter]
) -> dict[str, bool]:
    """Return the argument that chooses an implementation of torch, such as fused; none for the default."""
    if config.implementation == "default":
        return {}
    is_loop = config.implementation == "for-loop"
    argument = "foreach" if is_loop else config.implementation
    if argument not in parameters:
        raise UnsupportedCombination(
            f"optimizer {config.name} has no implementation {config.implementation}; leave out "
            "--optimizer-implementation"
        )
    return {argument: not is_loop}


def _arguments_without_setting(
    config: OptimizerConfig, parameters: Mapping[str, inspect.Parameter]
) -> Mapping[str, Any]:
    """Return the arguments that no setting has, as they are given; one that the optimizer lacks is refused."""
    is_open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    known = [name for name in parameters if name not in ("self", *OWN_SETTINGS)]
    for name in config.args:
        if name not in known and not is_open_ended:
            raise ConfigError(
                f"optimizer {config.name} has no argument {name!r}; {suggestion_text(name, known)}"
            )
    return config.args


def _parameters_of_factory(name: str, factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    # Of a class its constructor: a `__new__` that passes everything on would hide it.
    called = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):  # a compiled callable: it is called with the rate alone
        return {}
    kinds = {parameter.kind for parameter in parameters.values()}
    if "lr" not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
        raise ConfigError(
            f"optimizer {name} takes no lr, which every run sets; name a function with an lr argument"
        )
    return parameters


def _differs_from_default(config: OptimizerConfig, name: str) -> bool:
    return bool(getattr(config, name) != OptimizerConfig.model_fields[name].default)


def _argument_fits_setting(value: Any, default: Any) -> bool:
    """Return whether an argument means the same as the setting: its default is of the same kind."""
    if default is inspect.Parameter.empty:
        return True
    if isinstance(value, tuple):
        return isinstance(default, tuple | list) and len(default) == len(value)
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    return isinstance(default, int | float)


def _refuse_optimizer_setting(optimizer: str, name: str, value: Any, parameters: Mapping[str, Any]) -> None:
    takes = ", ".join(name for name in SETTINGS if name in parameters) or "none of them"
    shown = list(value) if isinstance(value, tuple) else value
    raise ConfigError(
        f"recipe.optimizer.{name} is {shown}, but optimizer {optimizer} does not take it; leave it out. Of "
        f"{', '.join(SETTINGS)} it takes {takes}"
    )


class _LayerRateHooks:
    """LARC or LARS on an optimizer with weight decay, by hooks: they adapt gradients in its step, after unscaling.

    A step that an overflow skips adapts nothing. Under O2 the hooks adapt the gradients of the fp32 masters.
    """

    def __init__(self, trust_coefficient: float, *, clip: bool) -> None:
        self._trust_coefficient = trust_coefficient
        self._clip = clip
        self._decays: list[float] = []

    def adapt_steps_of(self, optimizer: Optimizer) -> None:
        """Adapt the gradients of every step of `optimizer`."""
        larc = importlib.import_module("ampcompare.apex.parallel.LARC").LARC
        self._rates = larc(optimizer, trust_coefficient=self._trust_coefficient, clip=self._clip)
        optimizer.register_step_pre_hook(self._adapt_gradients_before_step)
        optimizer.register_step_post_hook(self._restore_weight_decays)

    @torch.no_grad()
    def _adapt_gradients_before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._decays = [group["weight_decay"] for group in optimizer.param_groups]
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            self._rates.adapt_group_gradients(group, decay)
            group["weight_decay"] = 0.0  # already part of the adapted gradients

    def _restore_weight_decays(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group, decay in zip(optimizer.param_groups, self._decays, strict=True):
            group["weight_decay"] = decay


def make_optimizer(config: OptimizerConfig, model: nn.Module, *, engine: str | None = None) -> Optimizer:
    """Build an optimizer over all parameters of `model`; with the engine "nvidia" those of Apex are genuine."""
    factory = import_optimizer_factory(config.name, engine)
    arguments = optimizer_arguments(config, factory)
    groups = make_param_groups(config, model)
    if "weight_decay" not in arguments:
        groups = [
            {name: value for name, value in group.items() if name != "weight_decay"} for group in groups
        ]
    optimizer = _call_optimizer_factory(config.name, factory, groups, arguments)
    if config.skip_on_device:
        try:
            make_step_skippable(optimizer)
        except TypeError as error:
            raise UnsupportedCombination(f"{error}; leave out skip_on_device") from None
    if config.layer_lr != "none":
        if not all("weight_decay" in group for group in optimizer.param_groups):
            raise UnsupportedCombination(
                f"layer_lr {config.layer_lr} applies the weight decay itself, but {config.name} has none; use another "
                f"optimizer"
            )
        _LayerRateHooks(config.trust_coefficient, clip=config.layer_lr == "larc").adapt_steps_of(optimizer)
    return optimizer


def _call_optimizer_factory(
    name: str, factory: Callable[..., Any], groups: Any, arguments: dict[str, Any]
) -> Optimizer:
    """Call the factory, and refuse what it refuses or returns in place of an optimizer."""
    try:
        optimizer = factory(groups, **arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"optimizer {name} cannot be built: {type(error).__name__}: {text}") from error
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer {name} is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer"
        )
    return optimizer


def make_param_groups(config: OptimizerConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters of `model` by learning rate and weight decay, in the model's order; one group by default.

    A parameter belongs to the first of `config.groups` whose pattern matches its name. If that group sets no weight
    decay, norms and biases have the decay that is set for them, if any.
    """
    # Norms of torch, Apex and models share this word in their names, but no base class.
    modules = (module for module in model.modules() if "Norm" in type(module).__name__)
    norms = {id(param) for module in modules for param in module.parameters(recurse=False)}
    unmatched = set(range(len(config.groups)))
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, param in model.named_parameters():
        decay = config.weight_decay
        if id(param) in norms and config.norm_weight_decay is not None:
            decay = config.norm_weight_decay
        elif name.endswith("bias") and config.bias_weight_decay is not None:
            decay = config.bias_weight_decay
        factor = 1.0
        for index, group in enumerate(config.groups):
            if fnmatchcase(name, group.match):
                unmatched.discard(index)
                factor = group.lr_factor
                decay = decay if group.weight_decay is None else group.weight_decay
                break
        groups.setdefault((config.lr * factor, decay), []).append(param)
    for index in sorted(unmatched):
        raise ConfigError(
            f"recipe.optimizer.groups[{index}] matches no parameter left to it: {config.groups[index].match!r}; names "
            f"look like {next(model.named_parameters())[0]}"
        )
    return [{"params": params, "lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()]


def make_parallel(config: ParallelConfig, device: torch.device, engine: str | None = None) -> Parallel:
    """Build the parallelism that a configuration names; for all but none and dp the caller initializes a process group.

    Args:
        config: kind and options.
        device: of this rank.
        engine: of the arm, "nvidia" or "compat"; None for arms without Apex.

    Raises:
        UnsupportedCombination: dp without a GPU or with the real Apex, or the real Apex's DDP without a GPU.
    """
    if config.kind == "none":
        return SingleProcess()
    if config.kind == "dp":
        if device.type != "cuda":
            raise UnsupportedCombination(
                f"dp splits a batch over the GPUs of one process, but the device is {device}, where it has no effect; "
                f"use --parallel ddp with --nproc-per-node"
            )
        if engine == "nvidia":
            raise UnsupportedCombination(
                "the real Apex replaces the forward of the one model that it was given, so that all replicas of dp "
                "would run the first one's weights; use --parallel ddp, or --engine compat"
            )
        return DP()
    if config.kind == "fsdp":
        return FSDP()
    convert = find_batch_norm_converter(config.sync_bn, device, engine)
    if config.kind == "ddp":
        return DDP(
            device,
            convert=convert,
            bucket_cap_mb=config.bucket_cap_mb,
            find_unused_parameters=config.find_unused_parameters,
        )
    if engine == "nvidia" and device.type != "cuda":
        raise UnsupportedCombination(
            f"the DistributedDataParallel of the real Apex needs a GPU, but the device is {device}; use --engine compat"
        )
    return ApexDDP(
        apex_parallel_module(engine).DistributedDataParallel,
        convert=convert,
        bucket_cap_mb=config.bucket_cap_mb,
        delay_allreduce=config.delay_allreduce,
    )


def let_compile_record_torch_functions(backend: str) -> None:
    """Let torch.compile record torch's functions by name, before an arm replaces some of them: call it first.

    It records them at its first use. After O1 it would take ampcompare's functions for torch's.
    """
    if backend != "none":
        torch.compile(lambda value: torch.relu(value).add(1).float(), backend="eager")(torch.zeros(1))


def compile_model(model: nn.Module, backend: str) -> nn.Module:
    """Return `model` compiled by a backend of torch.compile, sharing its parameters; itself for "none"."""
    if backend == "none":
        return model
    return cast(nn.Module, torch.compile(_ModelInOwnFrame(model), backend=backend))


class _ModelInOwnFrame(nn.Module):
    """Calls a model in a separate frame, so that its hooks are in the graph, and models of torch's own classes too."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def cpu_half_mode_of_run(choice: str, backend: str) -> str:
    """Return how a run computes fp16 on a CPU: torch.compile does not work under the dispatch mode that emulates it.

    Args:
        choice: the setting `cpu_half`: "auto", "emulated" or "native".
        backend: that of torch.compile; "none" if the model is not compiled.

    Returns:
        "native" where "auto" meets a compiled model, else `choice`.
    """
    return "native" if choice == "auto" and backend != "none" else choice
