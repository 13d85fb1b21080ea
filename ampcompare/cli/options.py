"""Options that several commands share; those of a setting take type, choices, help and default from its field."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import click

from ampcompare.analysis.criteria import Preference
from ampcompare.cli.renamed import RenamedOption
from ampcompare.cli.waiting import wait_option
from ampcompare.settings.config import RunConfig

__all__ = [
    "RECIPE_OPTIONS",
    "margin_options",
    "objective_option",
    "output_options",
    "parameter_of",
    "recipe_options",
]

Function = TypeVar("Function", bound=Callable[..., Any])

RECIPE_OPTIONS: tuple[tuple[str, str], ...] = (  # flags and the path of the setting in RunConfig
    ("--data", "recipe.data.name"),
    ("--data-dir", "recipe.data.dir"),
    ("--download", "recipe.data.download"),
    ("--image-size", "recipe.data.image_size"),
    ("--train-size", "recipe.data.train_size"),
    ("--val-size", "recipe.data.val_size"),
    ("--augment", "recipe.data.augment"),
    ("--arch -a", "recipe.model.arch"),
    ("--optimizer", "recipe.optimizer.name"),
    ("--lr", "recipe.optimizer.lr"),
    ("--momentum", "recipe.optimizer.momentum"),
    ("--nesterov", "recipe.optimizer.nesterov"),
    ("--weight-decay --wd", "recipe.optimizer.weight_decay"),
    ("--norm-weight-decay", "recipe.optimizer.norm_weight_decay"),
    ("--bias-weight-decay", "recipe.optimizer.bias_weight_decay"),
    ("--layerwise-lr", "recipe.optimizer.layer_lr"),
    ("--trust-coefficient", "recipe.optimizer.trust_coefficient"),
    ("--optimizer-implementation", "recipe.optimizer.implementation"),
    ("--skip-on-device", "recipe.optimizer.skip_on_device"),
    ("--eps", "recipe.optimizer.eps"),
    ("--schedule", "recipe.schedule.name"),
    ("--warmup-epochs", "recipe.schedule.warmup_epochs"),
    ("--step-epochs", "recipe.schedule.step_epochs"),
    ("--gamma", "recipe.schedule.gamma"),
    ("--epochs", "recipe.epochs"),
    ("--max-steps", "recipe.max_steps"),
    ("--batch-size -b", "recipe.batch_size"),
    ("--global-batch-size", "recipe.global_batch_size"),
    ("--lr-base", "recipe.optimizer.lr_base"),
    ("--lr-base-batch", "recipe.optimizer.lr_base_batch"),
    ("--lr-rule", "recipe.optimizer.lr_rule"),
    ("--parallel", "parallel.kind"),
    ("--sync-bn", "parallel.sync_bn"),
    ("--bucket-cap-mb", "parallel.bucket_cap_mb"),
    ("--delay-allreduce", "parallel.delay_allreduce"),
    ("--find-unused-parameters", "parallel.find_unused_parameters"),
    ("--launcher", "launcher"),
    ("--dist-backend", "parallel.backend"),
    ("--stall-timeout", "stall_timeout"),
    ("--grad-accum-steps", "recipe.grad_accum_steps"),
    ("--clip-grad", "recipe.clip_grad"),
    ("--label-smoothing", "recipe.label_smoothing"),
    ("--tta", "recipe.tta"),
    ("--early-stop", "recipe.early_stop"),
    ("--target-top1", "recipe.target_top1"),
    ("--ema-decay", "recipe.ema_decay"),
    ("--channels-last", "recipe.channels_last"),
    ("--cudnn-benchmark", "recipe.cudnn_benchmark"),
    ("--cuda-graph", "recipe.cuda_graph"),
    ("--compile", "recipe.compile"),
    ("--device", "device"),
    ("--cpu-half", "cpu_half"),
    ("--on-nan", "on_nan"),
    ("--rollback-every", "rollback_every"),
    ("--max-rollbacks", "max_rollbacks"),
    ("--fail-below-loss-scale", "stop_loss_scale"),
    ("--max-consecutive-skips", "max_skipped"),
    ("--nan-patience", "nan_patience"),
    ("--log-interval", "drain_every"),
    ("--warmup-steps", "warmup_steps"),
    ("--workers -j", "workers"),
    ("--pin-memory", "pin_memory"),
    ("--prefetch", "prefetch"),
    ("--threads", "threads"),
    ("--tf32", "tf32"),
    ("--deterministic", "deterministic"),
    ("--save-every-steps", "saving.every_steps"),
    ("--save-every-epochs", "saving.every_epochs"),
    ("--keep-last", "saving.keep_last"),
    ("--async-save", "saving.in_background"),
    ("--save-apex-format", "saving.apex_layout"),
    ("--weights-format", "saving.weights_format"),
    ("--resume", "saving.resume"),
    ("--convert-on-resume", "saving.resume_into_other_arm"),
)
METAVARS = {  # of values that are free text
    "recipe.data.name": "NAME",
    "recipe.data.dir": "DIR",
    "recipe.model.arch": "NAME",
    "device": "auto|cpu|cuda[:N]",
    "saving.resume": "auto|PATH",
}


def _field(path: str) -> Any:
    """Return the pydantic field at a path such as `recipe.data.name`."""
    model: Any = RunConfig
    *parents, name = path.split(".")
    for parent in parents:
        model = model.model_fields[parent].annotation
    return model.model_fields[name]


def parameter_of(path: str) -> str:
    """Return the name of the parameter that holds the option of a setting."""
    return path.replace(".", "__")


def _value_type(annotation: Any) -> Any:
    """Return what a field holds where it is set: the type inside of `Annotated` and of `... | None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (part for part in get_args(annotation) if part is not type(None))
    return annotation if get_origin(annotation) in (Literal, None) else get_args(annotation)[0]


def _option(flags: str, path: str) -> Callable[[Function], Function]:
    """Return the option of a setting. Bounds are left to the field, whose message names the setting."""
    field = _field(path)
    value_type = _value_type(field.annotation)
    names = flags.split()
    settings: dict[str, Any] = {"metavar": METAVARS.get(path)}
    if value_type is bool:
        names[0] = f"{names[0]}/--no-{names[0].removeprefix('--')}"
    elif get_origin(value_type) is Literal:
        settings["type"] = click.Choice(get_args(value_type))
    else:
        settings["type"] = value_type
    default = "none" if field.default is None else field.default
    shown = str(default).lower() if isinstance(default, bool) else default
    help_text = f"{field.description or ''}  [default: {shown}]".strip()
    return click.option(*names, parameter_of(path), cls=RenamedOption, default=None, help=help_text, **settings)


def recipe_options(function: Function) -> Function:
    """Add `--recipe` and `--size`, every option of a setting, `--model-arg`, `--config` and `--set`."""
    options = [
        click.option(
            "--recipe",
            "recipe_name",
            metavar="NAME|FILE",
            help="a complete, named configuration (see list recipes), or a YAML file of your own",
        ),
        click.option("--size", cls=RenamedOption, metavar="NAME", help="a smaller size of the recipe, such as small"),
        *(_option(flags, path) for flags, path in RECIPE_OPTIONS),
        click.option(
            "--strict-guards", "guards", flag_value="strict", help="treat AMP misuse in your code as an error"
        ),
        click.option("--no-guards", "guards", flag_value="off", help="do not look for AMP misuse"),
        click.option("--model-arg", "model_args", multiple=True, metavar="NAME=VALUE", help="argument of the network"),
        click.option("--config", "-c", "config_file", metavar="FILE", help="YAML file of settings"),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="A.B=C",
            help="a setting by its path: recipe.optimizer.eps=1e-4",
        ),
    ]
    return _add(options, function)


def output_options(function: Function) -> Function:
    """Add where results go and how much is printed."""
    options = [
        click.option("--output-dir", "-o", metavar="DIR", help="run directory  [default: runs/COMMAND-HASH]"),
        click.option("--force", is_flag=True, help="ignore records of earlier calls and run again"),
        wait_option(),
        click.option("--dry-run", is_flag=True, help="print what would run, and exit"),
        click.option("--json", "as_json", is_flag=True, help="one JSON document on stdout instead of the table"),
        click.option("--no-progress", is_flag=True, help="no progress bars; a plain line each minute instead"),
        click.option("--quiet", "-q", is_flag=True, help="no progress and no notes on stderr"),
    ]
    return _add(options, function)


def margin_options(function: Function) -> Function:
    """Add the margins of the verdicts."""
    options = [
        click.option(
            "--margin",
            callback=lambda context, parameter, value: number_or_text(value),
            metavar="MARGIN",
            help="equivalence margin of top-1: 0.5 (points), 10% (of the errors), 2sd (over seeds) or auto: the "
            "smaller of 0.5 and 10%; choose it before the runs  [default: auto]",
        ),
        click.option(
            "--time-margin",
            type=float,
            default=2.0,
            show_default=True,
            help="equivalence margin in percent of the step time",
        ),
    ]
    return _add(options, function)


def number_or_text(value: str | None) -> float | str | None:
    """Return a number as a number, so that the command and Python ask for the same; any other text as it is."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return value


def objective_option(function: Function) -> Function:
    """Add what the recommendation optimizes."""
    option = click.option(
        "--objective",
        cls=RenamedOption,
        type=click.Choice(get_args(Preference)),
        default="time",
        show_default=True,
        help="what the recommended arm improves while it keeps the accuracy",
    )
    return option(function)


def _add(options: Sequence[Callable[[Function], Function]], function: Function) -> Function:
    for option in reversed(options):
        function = option(function)
    return function
