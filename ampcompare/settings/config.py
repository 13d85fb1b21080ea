"""The configuration of a run: frozen data, checked when it is built, with JSON Schema for editors.

A `RunConfig` is a recipe, an arm, and how and where to run them. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, get_args

from pydantic import BaseModel, Field, field_validator, model_validator

from ampcompare.backends.arm import Arm, parse_arms
from ampcompare.base.environment.gpus import ACCELERATORS, non_cuda_accelerator_type
from ampcompare.base.errors import AmpCompareError, ConfigError, suggestion_text
from ampcompare.base.guard_modes import GuardMode
from ampcompare.settings.recipe import (
    DEFAULT_TASK,
    OLDER_TARGET,
    FrozenSettings,
    Positive,
    PositiveInt,
    Recipe,
    with_task_defaults,
)
from ampcompare.settings.script import ScriptConfig
from ampcompare.settings.stack import StackConfig, arm_text_with_stack
from ampcompare.settings.validation import paths_and_values

Launcher = Literal["auto", "torchrun", "spawn", "slurm", "ray"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
REMOTE_LAUNCHERS: tuple[Launcher, ...] = (
    "slurm",
    "ray",
)  # their cells wait in a queue, and run on other machines
AUTOCAST = "autocast:"
ON_NAN = ("stop", "continue", "skip", "rollback")
FALLBACK = "fallback:"
EVAL_PRECISIONS = ("fp32", "bf16", "fp16", "float64", "autocast:bf16", "autocast:fp16")
SYNONYMS = {
    "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp64": "float64", "double": "float64",
}  # fmt: skip
# Settings of a run that change none of its numbers. Exception in `saving`: a resume into another arm
# (`settings_digest`).
NON_NUMERIC_SETTINGS = frozenset({"saving", "guards", "stall_timeout", "allow_writes"})
# Settings that older records lack, by group: at these values the digest of a cell does not change.
LATER_SETTINGS: dict[str, dict[str, Any]] = {
    "": {"task": DEFAULT_TASK, "checkpoint_activations": False},
    "optimizer": {"skip_on_device": False, "args": {}},
    "data": {"sequence_length": None},
}
# The same for settings of a run outside of the recipe, at which `settings_digest` leaves them out.
LATER_RUN_SETTINGS: dict[str, Any] = {
    "script": None,
    "stack": None,
    "eval_precision": [],
    "first_weights": "seed",
}
LATER_SCRIPT_SETTINGS: dict[str, Any] = {"shift_seeds": None, "first_weights": None}
NO_DEFAULT = object()
# What casts by the lists of `autocast_lists`, as `Roles.lists` says; records from before that setting used the CPU's.
AUTOCAST_LISTS = "autocast"


class SavingConfig(FrozenSettings):
    """When a run is saved, and what it resumes from. Only a resume into another arm changes results, and the digest."""

    every_steps: PositiveInt | None = Field(
        None, description="save every this many updates, at the next log interval"
    )
    every_epochs: PositiveInt | None = Field(
        None, description="save every this many epochs, after the evaluation"
    )
    keep_last: PositiveInt = Field(2, description="checkpoints kept besides the best one")
    in_background: bool = Field(False, description="write from a snapshot while training continues")
    format: Literal["file", "sharded"] = Field(
        "file", description="of older records: each checkpoint is a file"
    )
    apex_layout: bool = Field(False, description="also write what a legacy Apex script would save")
    weights_format: Literal["checkpoint", "safetensors"] = Field(
        "checkpoint", description="safetensors: also write the weights alone to a file next to it"
    )
    resume: str | None = Field(
        None, description="a checkpoint or its folder; auto: the newest one of this run, if any"
    )
    resume_into_other_arm: bool = Field(
        False, description="convert a checkpoint that another arm has written"
    )
    stop_at_step: PositiveInt | None = Field(
        None, description="stop at the first log interval at or after this update, as SIGTERM would"
    )


class ParallelConfig(FrozenSettings):
    """How replicas of the model work together."""

    kind: Literal["none", "ddp", "apex-ddp", "dp", "fsdp"] = Field(
        "none",
        description="DDP of torch or of Apex; fsdp: weights in shards; dp: one process with many GPUs. ddp by default "
        "with several processes, fsdp for arms of that name",
    )
    sync_bn: Literal["none", "torch", "apex"] = Field(
        "none", description="SyncBatchNorm implementation that replaces batch norm"
    )
    bucket_cap_mb: Positive | None = Field(
        None, description="ddp, apex-ddp: MiB of gradients reduced together"
    )
    delay_allreduce: bool = Field(False, description="apex-ddp: reduce once, at the end of the backward pass")
    find_unused_parameters: bool = Field(False, description="ddp: some parameters may get no gradient")
    backend: Literal["auto", "gloo", "nccl", "mpi"] = Field(
        "auto", description="torch.distributed backend; auto: nccl on GPUs and gloo on CPUs"
    )

    @property
    def needs_process_group(self) -> bool:
        """Whether a process group must exist, even with one process."""
        return self.kind in ("ddp", "apex-ddp", "fsdp")

    @model_validator(mode="after")
    def _require_kind_for_options(self) -> ParallelConfig:
        kinds = {
            "sync_bn": (self.sync_bn != "none", ("ddp", "apex-ddp")),
            "bucket_cap_mb": (self.bucket_cap_mb is not None, ("ddp", "apex-ddp")),
            "delay_allreduce": (self.delay_allreduce, ("apex-ddp",)),
            "find_unused_parameters": (self.find_unused_parameters, ("ddp",)),
        }
        for name, (given, fitting) in kinds.items():
            if given and self.kind not in fitting:
                raise ValueError(f"{name} is for kind {' and '.join(fitting)}, but the kind is {self.kind}")
        if self.delay_allreduce and self.bucket_cap_mb is not None:
            raise ValueError(
                "delay_allreduce reduces all gradients at once, so bucket_cap_mb has no effect; leave one of them out"
            )
        return self


def parse_eval_precisions(precision_texts: str | Iterable[str]) -> tuple[str, ...]:
    """Return precisions in their canonical names, each once, in order, from names or a text with commas."""
    names = precision_texts.split(",") if isinstance(precision_texts, str) else precision_texts
    return tuple(dict.fromkeys(_canonical_precision(name.strip()) for name in names if name.strip()))


def _canonical_precision(name: str) -> str:
    prefix = AUTOCAST if name.startswith(AUTOCAST) else ""
    bare = name.removeprefix(prefix)
    known = f"{prefix}{SYNONYMS.get(bare, bare)}"
    if known not in EVAL_PRECISIONS:
        raise ConfigError(
            f"there is no precision {name!r} to evaluate in; choose from {', '.join(EVAL_PRECISIONS)}"
        )
    return known


class RunConfig(FrozenSettings):
    """One arm of a recipe, and how to run it."""

    recipe: Recipe = Recipe()
    arm: str = "fp32"
    processes: PositiveInt = Field(1, description="processes that train together, over all nodes")
    parallel: ParallelConfig = ParallelConfig()
    launcher: Launcher = Field(
        "auto",
        description="what starts the processes; auto: a fork for one, spawn for several",
    )
    device: str = Field(
        "auto", description="where to train: auto (a GPU if there is one), cpu, cuda[:N], mps, xpu[:N]"
    )
    cpu_half: Literal["auto", "emulated", "native"] = Field(
        "auto",
        description="16-bit types on a CPU: emulated computes in fp32 and rounds once, native uses the CPU's own "
        "kernels; auto emulates fp16, and bf16 where the CPU has no instructions for it",
    )
    autocast_lists: Literal["cuda", "cpu"] = Field(
        "cuda",
        description="what torch.autocast casts on a CPU: what it casts on cuda, so that results hold for a GPU, or the "
        "lists of the cpu, for models that are used there",
    )
    on_nan: str = Field(
        "stop",
        description="when training diverges: stop, continue, or go back to a good state (rollback); skip: also drop "
        "each update with a non-finite loss before that; fallback:ARM[,ARM...]: train again under the next of these "
        "arms, as in fallback:bf16,fp32",
    )
    rollback_every: PositiveInt = Field(100, description="with rollback: steps between snapshots")
    max_rollbacks: PositiveInt = Field(3, description="with rollback: how often a run may go back")
    stop_loss_scale: Positive | None = Field(
        None, description="fail as diverged when a loss scale falls below this value"
    )
    max_skipped: PositiveInt | None = Field(
        None, description="fail as diverged when more consecutive steps than this are skipped"
    )
    nan_patience: PositiveInt = Field(
        10, description="steps in a row with a non-finite loss that count as divergence"
    )
    drain_every: PositiveInt = Field(
        20, description="steps between two reads of losses and loss scales from the device"
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(
        10, description="first steps to leave out of step times"
    )
    workers: Annotated[int, Field(ge=0)] = Field(0, description="data loader processes")
    pin_memory: bool | None = Field(
        None, description="copy batches to a GPU from pinned memory, without waiting; on by default"
    )
    prefetch: Annotated[int, Field(ge=0)] = Field(
        0, description="batches that are copied to a GPU ahead of their step"
    )
    threads: PositiveInt = Field(1, description="CPU threads per operation")
    tf32: Literal["torch", "on", "off"] = Field(
        "torch",
        description="TF32 for fp32 products and convolutions on a GPU; torch: its own setting, convolutions only",
    )
    deterministic: bool = Field(False, description="refuse operations without a deterministic version")
    guards: GuardMode = Field(
        "warn",
        description="AMP misuse in your code or in another package, checked until the timed steps: a note, an error, "
        "or not checked",
    )
    stall_timeout: Positive = Field(
        300.0, description="seconds that ranks wait for a stalled rank before the run fails"
    )
    first_weights: Literal["seed", "twin"] = Field(
        "seed",
        description="those of the seed, or a twin: each changed by one part in 512, as much as bf16 rounds",
    )
    allow_writes: tuple[str, ...] = Field(
        (),
        description="folders that your own code may really change, joined by commas; what it writes elsewhere lies in "
        "the folder of the cell, and your files stay as they are",
    )
    eval_precision: tuple[str, ...] = Field(
        (),
        description="evaluate the trained weights in these precisions too, joined by commas: fp32, bf16, fp16, "
        "float64, autocast:bf16, autocast:fp16",
    )
    saving: SavingConfig = SavingConfig()
    script: ScriptConfig | None = Field(
        None, description="a user's own script, which then trains in place of the recipe"
    )
    stack: StackConfig | None = Field(
        None, description="another environment in which it trains; none: this one"
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_derived_settings(cls, values: Any) -> Any:
        """Fill in settings that follow from others: parallel kind, batch size of a process, learning rate."""
        return _with_derived_settings(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _check_settings_fit(self) -> RunConfig:
        kind, recipe = self.parallel.kind, self.recipe
        if self.processes > 1 and kind in ("none", "dp"):
            raise ValueError(
                f"{self.processes} processes with parallel kind {kind} would not share their gradients; use ddp, "
                "apex-ddp or fsdp, or one process"
            )
        if self.deterministic and recipe.cudnn_benchmark:
            raise ValueError(
                "cudnn_benchmark may choose another kernel in each run, but deterministic forbids that; give only one "
                "of them"
            )
        if recipe.compile != "none" and kind == "dp":
            raise ValueError(
                "dp copies the model at each step, and each copy would be compiled again; use ddp"
            )
        if recipe.compile != "none" and self.cpu_half == "emulated":
            raise ValueError(
                "torch.compile does not see into emulated fp16 and would silently compile nothing; "
                "use cpu_half native, or compile none"
            )
        if self.script is not None and self.eval_precision:
            raise ValueError(
                "eval_precision evaluates the model of a task, but a script evaluates its own model; leave out one of "
                "them"
            )
        if self.fallback_arms and (self.launcher in ("slurm", "ray") or self.script is not None):
            what = "a script" if self.script is not None else f"launcher {self.launcher}"
            raise ValueError(
                f"on_nan fallback trains a cell of a recipe again on this machine, and not one of {what}"
            )
        return self

    @model_validator(mode="after")
    def _check_shards_fit(self) -> RunConfig:
        spec = self.parsed_arm.spec
        kind = self.parallel.kind
        recipe = self.recipe
        if spec.parallel and kind != spec.parallel:
            raise ValueError(
                f"{self.arm} uses parallel kind {spec.parallel}, but the kind given is {kind}; leave the kind out"
            )
        if kind != "fsdp":
            return self
        why = spec.unsharded(self.parsed_arm.options)
        if why:
            raise ValueError(f"{self.arm} cannot be combined with parallel kind fsdp: {why}")
        whole = {
            "ema_decay averages": recipe.ema_decay is not None,
            f"compile {recipe.compile} traces": recipe.compile != "none",
            f"layer_lr {recipe.optimizer.layer_lr} measures": recipe.optimizer.layer_lr != "none",
            "skip_on_device copies": recipe.optimizer.skip_on_device,
            "on_nan rollback copies": self.on_nan == "rollback",
        }
        if setting := _text_of_first_clash(whole):
            raise ValueError(f"{setting} whole weights, but fsdp shards them; leave one of the two out")
        return self

    @model_validator(mode="after")
    def _check_graph_fits(self) -> RunConfig:
        if not self.recipe.cuda_graph:
            return self
        obstacles = {
            f"parallel kind {self.parallel.kind} communicates with other processes inside the step": self.parallel.kind
            != "none",
            f"on_nan {self.on_nan} reads or replaces what the graph holds": self.on_nan
            in ("skip", "rollback"),
            f"layer_lr {self.recipe.optimizer.layer_lr} runs Python inside the step": (
                self.recipe.optimizer.layer_lr != "none"
            ),
            f"compile {self.recipe.compile} may compile the step again": self.recipe.compile != "none",
        }
        if obstacle := _text_of_first_clash(obstacles):
            raise ValueError(f"cuda_graph replays one captured step, but {obstacle}; leave one of them out")
        return self

    @property
    def samples_per_update(self) -> int:
        """Samples in one update of all processes."""
        return self.recipe.batch_size * self.processes

    @field_validator("arm")
    @classmethod
    def _respell_arm(cls, text: str) -> str:
        try:
            return str(Arm.parse(text))
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @field_validator("on_nan")
    @classmethod
    def _require_known_policy(cls, text: str) -> str:
        try:
            if text.startswith(FALLBACK):
                arms = parse_arms([text.removeprefix(FALLBACK)])
                return FALLBACK + ",".join(map(str, arms))
            if text not in ON_NAN:
                raise ConfigError(
                    f"on_nan {text!r} is unknown; {suggestion_text(text, [*ON_NAN, f'{FALLBACK}ARM'])}"
                )
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return text

    @property
    def fallback_arms(self) -> tuple[str, ...]:
        """The arms under which a cell that diverges is trained again, in turn."""
        if not self.on_nan.startswith(FALLBACK):
            return ()
        return tuple(str(arm) for arm in parse_arms([self.on_nan.removeprefix(FALLBACK)]))

    @field_validator("eval_precision", mode="before")
    @classmethod
    def _check_precisions(cls, given: Any) -> Any:
        if not isinstance(given, str) and not (
            isinstance(given, (list, tuple)) and all(isinstance(name, str) for name in given)
        ):
            return given
        try:
            return parse_eval_precisions(given)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @field_validator("allow_writes", mode="before")
    @classmethod
    def _make_paths_absolute(cls, given: Any) -> Any:
        paths = given.split(",") if isinstance(given, str) else given
        is_text = isinstance(paths, (list, tuple)) and all(isinstance(path, str) for path in paths)
        return tuple(os.path.abspath(os.path.expanduser(path)) for path in paths) if is_text else given

    @field_validator("device")
    @classmethod
    def _require_known_device(cls, text: str) -> str:
        kind, _, index = text.partition(":")
        is_index = not index or re.fullmatch("[0-9]{1,4}", index)
        if not is_index or kind not in ("auto", "cpu", "cuda", *ACCELERATORS):
            raise ValueError(
                f"device {text!r} is unknown; use auto, cpu, cuda, {', '.join(ACCELERATORS)}, or one "
                f"with an index such as cuda:1"
            )
        return text

    @model_validator(mode="after")
    def _check_accelerator_fits(self) -> RunConfig:
        kind = non_cuda_accelerator_type(self.device)
        if not kind:
            return self
        why = self.parsed_arm.spec.elsewhere(self.parsed_arm.options)
        if why:
            raise ValueError(f"{self.arm} does not run on {kind}: {why}")
        others = {
            f"{self.processes} processes share their gradients": self.processes > 1,
            f"parallel kind {self.parallel.kind} works": self.parallel.kind != "none",
            "skip_on_device skips steps": self.recipe.optimizer.skip_on_device,
            "a script trains": self.script is not None,
        }
        if setting := _text_of_first_clash(others):
            raise ValueError(f"{setting} on a CPU or on GPUs of CUDA only, and the device is {self.device}")
        return self

    @property
    def arm_with_stack(self) -> str:
        """The arm, and the stack in which it trains, as in script@old."""
        return arm_text_with_stack(self.arm, self.stack.name if self.stack else None)

    @property
    def parsed_arm(self) -> Arm:
        """The arm as its backend and options."""
        return Arm.parse(self.arm)

    def writable_paths(self, *own: Path) -> list[Path] | None:
        """Return the paths, `own` among them, that a sandbox of the user's code leaves open; None if it runs none."""
        recipe = self.recipe
        names = (recipe.task, recipe.model.arch, recipe.data.name, recipe.optimizer.name)
        is_users = self.script is not None or any(":" in name for name in names)  # a factory
        return [*own, *map(Path, self.allow_writes)] if is_users else None

    def values_by_path(self) -> dict[str, Any]:
        """Return each setting but the arm by its path, such as `recipe.optimizer.lr`."""
        return dict(paths_and_values(self.model_dump(exclude={"arm"})))

    @classmethod
    def defaults_by_path(cls) -> dict[str, Any]:
        """Return the default of each setting but the arm by its path."""
        return cls().values_by_path()

    def digest(self) -> str:
        """Return the name of this cell: 12 hexadecimal digits that change with any setting that can change a number."""
        return settings_digest(self.model_dump(mode="json"))


def _text_of_first_clash(cases: Mapping[str, bool]) -> str:
    """Return the first text whose condition holds; "" if none does."""
    return next((text for text, holds in cases.items() if holds), "")


def _with_derived_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a `RunConfig` with those that follow from others filled in; refuse a contradiction."""
    values = dict(values)
    processes = values.get("processes", 1)
    recipe = _copy_of_given_values(values.get("recipe"))
    if not isinstance(processes, int) or processes < 1 or recipe is None:
        return values
    recipe = with_task_defaults(recipe)
    kind = _implied_parallel_kind(values.get("arm")) or ("ddp" if processes > 1 else "")
    parallel = _copy_of_given_values(values.get("parallel"))
    if kind and parallel is not None:
        values["parallel"] = {"kind": kind, **parallel}
    total = recipe.get("global_batch_size")
    if isinstance(total, int) and total > 0:
        if total % processes:
            raise ValueError(f"a total batch of {total} cannot be split over {processes} processes")
        if recipe.setdefault("batch_size", total // processes) != total // processes:
            raise ValueError(
                f"a total batch of {total} on {processes} processes is {total // processes} for each, but batch_size "
                f"is {recipe['batch_size']}; give only one of them"
            )
    batch_size = recipe.get("batch_size", Recipe.model_fields["batch_size"].default)
    given_optimizer = _copy_of_given_values(recipe.get("optimizer"))
    optimizer: dict[str, Any] = {} if given_optimizer is None else given_optimizer
    base: Any = optimizer.get("lr_base")
    base_batch: Any = optimizer.get("lr_base_batch", 256)
    if _is_positive_number(base) and _is_positive_number(base_batch) and _is_positive_number(batch_size):
        ratio = batch_size * processes / base_batch
        lr = base * (math.sqrt(ratio) if optimizer.get("lr_rule") == "sqrt" else ratio)
        given = optimizer.setdefault("lr", lr)
        if isinstance(given, (int, float)) and not math.isclose(given, lr, rel_tol=1e-9):
            raise ValueError(
                f"lr_base {base} gives lr {lr:g} for a total batch of {batch_size * processes}, but lr is {given}; "
                f"give only one of them"
            )
        recipe["optimizer"] = optimizer
    if recipe:
        values["recipe"] = recipe
    return values


def _implied_parallel_kind(arm: Any) -> str:
    """Return the parallel kind that an arm implies; "" if none, or if it is not an arm."""
    if arm is None:
        return ""
    try:
        return (arm if isinstance(arm, Arm) else Arm.parse(str(arm))).spec.parallel
    except AmpCompareError:  # reported where the arm is checked
        return ""


def _is_positive_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and value > 0


def _copy_of_given_values(group: Any) -> dict[str, Any] | None:
    """Return what was given of a group of settings, as a copy; None where it is not a group."""
    if group is None:
        return {}
    if isinstance(group, BaseModel):
        return {name: getattr(group, name) for name in group.model_fields_set}
    return dict(group) if isinstance(group, Mapping) else None


def _digest_text_of_arm(arm: Any) -> Any:
    """Return the text of an arm that goes into a digest: its key, whatever its spelling; as it is if it is no arm."""
    try:
        return Arm.parse(arm).digest_text if isinstance(arm, str) else arm
    except AmpCompareError:  # of a backend that is not installed here
        return arm


def settings_digest(values: Mapping[str, Any]) -> str:
    """Return the digest of the settings of a run as JSON holds them, which may be those of another version.

    A run that may resume from another arm's checkpoint is another cell: another arm trained part of its weights.
    """
    numeric = {
        name: value
        for name, value in values.items()
        if name not in NON_NUMERIC_SETTINGS and LATER_RUN_SETTINGS.get(name, NO_DEFAULT) != value
    }
    if numeric.get("autocast_lists") == autocast_lists_of_older_settings(values):
        del numeric["autocast_lists"]
    numeric["arm"] = _digest_text_of_arm(values.get("arm"))
    if str(on_nan := values.get("on_nan")).startswith(FALLBACK):
        arms = parse_arms([str(on_nan).removeprefix(FALLBACK)])
        numeric["on_nan"] = FALLBACK + ",".join(arm.digest_text for arm in arms)
    recipe = values.get("recipe")
    if isinstance(recipe, Mapping):
        numeric["recipe"] = _settings_as_first_version_wrote(recipe)
    if isinstance(script := values.get("script"), Mapping):
        numeric["script"] = _without_default_values(script, LATER_SCRIPT_SETTINGS)
    saving = values.get("saving")
    if isinstance(saving, Mapping) and saving.get("resume") and saving.get("resume_into_other_arm"):
        numeric["resume_into_other_arm"] = True
    return hashlib.sha256(json.dumps(numeric, sort_keys=True).encode()).hexdigest()[:12]


def autocast_lists_of_older_settings(values: Mapping[str, Any], device: str = "") -> str:
    """Return the value of `autocast_lists` for settings from before there was one.

    `torch.autocast` cast by the CPU's lists on a CPU. Where it does not act, the default changes nothing.

    Args:
        values: the settings, as their file has them.
        device: of the run, such as "cpu"; "" for that of the settings.

    Returns:
        "cpu" where the run cast by the CPU's own lists, and "cuda" elsewhere.
    """
    device = device or str(values.get("device", "auto"))
    if device != "auto" and device.partition(":")[0] != "cpu":
        return "cuda"
    precisions = values.get("eval_precision") or ()
    if any(str(name).startswith(AUTOCAST) for name in precisions):
        return "cpu"
    try:
        roles = Arm.parse(str(values.get("arm"))).roles
    except AmpCompareError:  # of another version
        return "cuda"
    casts = values.get("script") is not None if roles is None else roles.lists == AUTOCAST_LISTS
    return "cpu" if casts else "cuda"


def _without_default_values(values: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if later.get(name, NO_DEFAULT) != value}


def _settings_as_first_version_wrote(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe as the first version would have written them, where it could have."""
    known = {}
    for name, value in recipe.items():
        later = LATER_SETTINGS.get(name, {})
        if isinstance(value, Mapping) and later:
            value = _without_default_values(value, later)
        if LATER_SETTINGS[""].get(name, NO_DEFAULT) != value:
            known[OLDER_TARGET if name == "target" else name] = value
    return known
