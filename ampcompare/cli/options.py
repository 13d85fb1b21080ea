"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ampcompare.config import RunConfig

__all__ = ["RECIPE_OPTIONS", "output_options", "parameter_of", "recipe_options"]

Function = TypeVar("Function", bound=Callable[..., Any])

# flag names, place in RunConfig, keyword arguments of click.option
RECIPE_OPTIONS: list[tuple[tuple[str, ...], str, dict[str, Any]]] = [
    (("--data",), "recipe.data.name", {"metavar": "NAME"}),
    (("--data-dir",), "recipe.data.dir", {"metavar": "DIR"}),
    (("--download/--no-download",), "recipe.data.download", {}),
    (("--image-size",), "recipe.data.image_size", {"type": int}),
    (("--train-size",), "recipe.data.train_size", {"type": int}),
    (("--val-size",), "recipe.data.val_size", {"type": int}),
    (("--augment/--no-augment",), "recipe.data.augment", {}),
    (("--arch", "-a"), "recipe.model.arch", {"metavar": "NAME"}),
    (("--optimizer",), "recipe.optimizer.name", {"metavar": "sgd|adam|adamw"}),
    (("--lr",), "recipe.optimizer.lr", {"type": float, "help": "base learning rate"}),
    (("--momentum",), "recipe.optimizer.momentum", {"type": float, "help": "of sgd"}),
    (("--nesterov/--no-nesterov",), "recipe.optimizer.nesterov", {"help": "of sgd"}),
    (("--weight-decay", "--wd"), "recipe.optimizer.weight_decay", {"type": float}),
    (("--norm-weight-decay",), "recipe.optimizer.norm_weight_decay", {"type": float}),
    (("--bias-weight-decay",), "recipe.optimizer.bias_weight_decay", {"type": float}),
    (("--layer-lr",), "recipe.optimizer.layer_lr", {"metavar": "none|larc|lars"}),
    (("--trust-coefficient",), "recipe.optimizer.trust_coefficient", {"type": float}),
    (("--eps",), "recipe.optimizer.eps", {"type": float, "help": "of adam and adamw"}),
    (("--schedule",), "recipe.schedule.name", {"metavar": "constant|step|cosine"}),
    (("--warmup-epochs",), "recipe.schedule.warmup_epochs", {"type": float}),
    (("--step-epochs",), "recipe.schedule.step_epochs", {"type": int}),
    (("--gamma",), "recipe.schedule.gamma", {"type": float}),
    (("--epochs",), "recipe.epochs", {"type": int, "help": "passes over the training set"}),
    (("--max-steps",), "recipe.max_steps", {"type": int}),
    (("--batch-size", "-b"), "recipe.batch_size", {"type": int}),
    (("--global-batch-size",), "recipe.global_batch_size", {"type": int}),
    (("--lr-base",), "recipe.optimizer.lr_base", {"type": float}),
    (("--lr-base-batch",), "recipe.optimizer.lr_base_batch", {"type": int}),
    (("--lr-rule",), "recipe.optimizer.lr_rule", {"metavar": "linear|sqrt"}),
    (("--parallel",), "parallel.kind", {"metavar": "none|ddp|apex-ddp|dp"}),
    (("--sync-bn",), "parallel.sync_bn", {"metavar": "none|torch|apex"}),
    (("--bucket-cap-mb",), "parallel.bucket_cap_mb", {"type": float}),
    (("--delay-allreduce/--no-delay-allreduce",), "parallel.delay_allreduce", {}),
    (("--find-unused-parameters/--no-find-unused-parameters",), "parallel.find_unused_parameters", {}),
    (("--launcher",), "launcher", {"metavar": "auto|torchrun|spawn|slurm"}),
    (("--dist-backend",), "parallel.backend", {"metavar": "auto|gloo|nccl|mpi"}),
    (("--grad-accum-steps",), "recipe.grad_accum_steps", {"type": int}),
    (("--clip-grad",), "recipe.clip_grad", {"type": float}),
    (("--label-smoothing",), "recipe.label_smoothing", {"type": float}),
    (("--tta",), "recipe.tta", {"metavar": "none|flips|shifts"}),
    (("--early-stop",), "recipe.early_stop", {"type": int}),
    (("--target-top1",), "recipe.target_top1", {"type": float}),
    (("--ema-decay",), "recipe.ema_decay", {"type": float}),
    (("--channels-last/--no-channels-last",), "recipe.channels_last", {"help": "memory format of models and images"}),
    (("--compile",), "recipe.compile", {"metavar": "none|inductor|aot_eager|eager"}),
    (("--device",), "device", {"metavar": "auto|cpu|cuda[:N]"}),
    (("--cpu-half",), "cpu_half", {"metavar": "auto|emulated|native"}),
    (("--on-nan",), "on_nan", {"metavar": "stop|continue|skip|rollback"}),
    (("--rollback-every",), "rollback_every", {"type": int}),
    (("--max-rollbacks",), "max_rollbacks", {"type": int}),
    (("--stop-loss-scale",), "stop_loss_scale", {"type": float}),
    (("--max-skipped",), "max_skipped", {"type": int}),
    (("--nan-patience",), "nan_patience", {"type": int}),
    (("--drain-every",), "drain_every", {"type": int}),
    (("--warmup-steps",), "warmup_steps", {"type": int}),
    (("--workers", "-j"), "workers", {"type": int}),
    (("--pin-memory/--no-pin-memory",), "pin_memory", {}),
    (("--prefetch",), "prefetch", {"type": int}),
    (("--threads",), "threads", {"type": int}),
    (("--tf32",), "tf32", {"metavar": "torch|on|off"}),
    (("--deterministic/--no-deterministic",), "deterministic", {}),
    (
        ("--strict-guards",),
        "guards",
        {"flag_value": "strict", "help": "a mistake in the use of amp by code of yours is an error"},
    ),
    (("--no-guards",), "guards", {"flag_value": "off", "help": "do not look for such mistakes"}),
    (("--save-every-steps",), "saving.every_steps", {"type": int}),
    (("--save-every-epochs",), "saving.every_epochs", {"type": int}),
    (("--keep-last",), "saving.keep_last", {"type": int}),
    (("--async-save/--no-async-save",), "saving.in_background", {}),
    (("--apex-layout/--no-apex-layout",), "saving.apex_layout", {}),
    (("--weights-format",), "saving.weights_format", {"metavar": "checkpoint|safetensors"}),
    (("--resume",), "saving.resume", {"metavar": "auto|PATH"}),
    (("--resume-into-other-arm/--no-resume-into-other-arm",), "saving.resume_into_other_arm", {}),
]


def _field(place: str) -> Any:
    """Return the pydantic field that a place such as `recipe.data.name` names."""
    model: Any = RunConfig
    *parents, name = place.split(".")
    for parent in parents:
        model = model.model_fields[parent].annotation
    return model.model_fields[name]


def parameter_of(place: str) -> str:
    """Return the name of the parameter that holds the option of a setting."""
    return place.replace(".", "__")


def _option(entry: tuple[tuple[str, ...], str, dict[str, Any]]) -> Callable[[Function], Function]:
    """Return the click option of one entry, its help and default read from the field where it has none of its own."""
    flags, place, settings = entry
    field = _field(place)
    default = "none" if field.default is None else field.default
    shown = str(default).lower() if isinstance(default, bool) else default
    text = settings.get("help") or field.description or ""
    return click.option(
        *flags, parameter_of(place), default=None, **{**settings, "help": f"{text}  [default: {shown}]"}
    )


def recipe_options(function: Function) -> Function:
    """Add `--recipe` and `--scale`, every option of a recipe, `--model-arg`, `--config` and `--set`."""
    first = [
        click.option(
            "--recipe",
            "recipe_name",
            metavar="NAME|FILE",
            help="a complete, named configuration (see list recipes), or a YAML file of your own",
        ),
        click.option("--scale", metavar="NAME", help="a smaller shape of the recipe, such as small"),
    ]
    last = [
        click.option("--model-arg", "model_args", multiple=True, metavar="NAME=VALUE", help="argument of the network"),
        click.option("--config", "-c", "config_file", metavar="FILE", help="YAML file of settings"),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="A.B=C",
            help="a setting by its place: recipe.optimizer.eps=1e-4",
        ),
    ]
    for option in reversed([*first, *map(_option, RECIPE_OPTIONS), *last]):
        function = option(function)
    return function


def output_options(function: Function) -> Function:
    """Add where results go and how much is said."""
    options = [
        click.option("--output-dir", "-o", metavar="DIR", help="run directory  [default: runs/COMMAND-HASH]"),
        click.option("--force", is_flag=True, help="run again what has a usable record"),
        click.option("--dry-run", is_flag=True, help="print what would run, and end"),
        click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout instead of the table"),
        click.option("--no-progress", is_flag=True, help="no progress bar"),
        click.option("--quiet", "-q", is_flag=True, help="no progress and no notes on stderr"),
    ]
    for option in reversed(options):
        function = option(function)
    return function
