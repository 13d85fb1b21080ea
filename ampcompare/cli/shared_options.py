"""Options that several commands share; those of a setting take type, choices, help and default from its field."""

import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from ampcompare.backends.arm import Arm
from ampcompare.base.option_rules import OptionRule, rule_of_exclusion, rule_of_need
from ampcompare.base.secrets.masking import hide_secrets_in_words
from ampcompare.cli.help import (
    ARMS,
    CHECKPOINTS,
    COMPARISON,
    DATA,
    DIVERGENCE,
    MACHINE,
    OPTIMIZER,
    OUTPUT,
    PROCESSES,
    SCHEDULE,
    SCRIPT,
    SETTINGS,
    OptionOf,
    add_options,
    option,
    type_inside_annotation,
)
from ampcompare.cli.values import FILE, FLAG, FOLDER, HALF, LEVEL, WordChoice
from ampcompare.settings.config import RunConfig
from ampcompare.settings.reads import CommandReads

Function = TypeVar("Function", bound=Callable[..., Any])

# flags, the path of the setting in RunConfig, and the group
RECIPE_OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("--task", "recipe.task", DATA),
    ("--arch -a", "recipe.model.arch", DATA),
    ("--data", "recipe.data.name", DATA),
    ("--data-dir", "recipe.data.dir", DATA),
    ("--download", "recipe.data.download", DATA),
    ("--image-size", "recipe.data.image_size", DATA),
    ("--train-size", "recipe.data.train_size", DATA),
    ("--val-size", "recipe.data.val_size", DATA),
    ("--sequence-length", "recipe.data.sequence_length", DATA),
    ("--augment", "recipe.data.augment", DATA),
    ("--label-smoothing", "recipe.label_smoothing", DATA),
    ("--tta", "recipe.tta", DATA),
    ("--eval-precision", "eval_precision", DATA),
    ("--optimizer", "recipe.optimizer.name", OPTIMIZER),
    ("--lr", "recipe.optimizer.lr", OPTIMIZER),
    ("--momentum", "recipe.optimizer.momentum", OPTIMIZER),
    ("--weight-decay --wd", "recipe.optimizer.weight_decay", OPTIMIZER),
    ("--norm-weight-decay", "recipe.optimizer.norm_weight_decay", OPTIMIZER),
    ("--bias-weight-decay", "recipe.optimizer.bias_weight_decay", OPTIMIZER),
    ("--layerwise-lr", "recipe.optimizer.layer_lr", OPTIMIZER),
    ("--optimizer-implementation", "recipe.optimizer.implementation", OPTIMIZER),
    ("--skip-on-device", "recipe.optimizer.skip_on_device", OPTIMIZER),
    ("--eps", "recipe.optimizer.eps", OPTIMIZER),
    ("--lr-base", "recipe.optimizer.lr_base", OPTIMIZER),
    ("--lr-base-batch", "recipe.optimizer.lr_base_batch", OPTIMIZER),
    ("--clip-grad", "recipe.clip_grad", OPTIMIZER),
    ("--ema-decay", "recipe.ema_decay", OPTIMIZER),
    ("--epochs", "recipe.epochs", SCHEDULE),
    ("--max-steps", "recipe.max_steps", SCHEDULE),
    ("--batch-size -b", "recipe.batch_size", SCHEDULE),
    ("--global-batch-size", "recipe.global_batch_size", SCHEDULE),
    ("--grad-accum-steps", "recipe.grad_accum_steps", SCHEDULE),
    ("--schedule", "recipe.schedule.name", SCHEDULE),
    ("--warmup-epochs", "recipe.schedule.warmup_epochs", SCHEDULE),
    ("--step-epochs", "recipe.schedule.step_epochs", SCHEDULE),
    ("--gamma", "recipe.schedule.gamma", SCHEDULE),
    ("--early-stop", "recipe.early_stop", SCHEDULE),
    ("--target", "recipe.target", SCHEDULE),
    ("--parallel", "parallel.kind", PROCESSES),
    ("--sync-bn", "parallel.sync_bn", PROCESSES),
    ("--delay-allreduce", "parallel.delay_allreduce", PROCESSES),
    ("--launcher", "launcher", PROCESSES),
    ("--dist-backend", "parallel.backend", PROCESSES),
    ("--stall-timeout", "stall_timeout", PROCESSES),
    ("--allow-writes", "allow_writes", SCRIPT),
    ("--on-nan", "on_nan", DIVERGENCE),
    ("--fail-below-loss-scale", "stop_loss_scale", DIVERGENCE),
    ("--max-consecutive-skips", "max_skipped", DIVERGENCE),
    ("--save-every-steps", "saving.every_steps", CHECKPOINTS),
    ("--save-every-epochs", "saving.every_epochs", CHECKPOINTS),
    ("--async-save", "saving.in_background", CHECKPOINTS),
    ("--save-apex-format", "saving.apex_layout", CHECKPOINTS),
    ("--weights-format", "saving.weights_format", CHECKPOINTS),
    ("--resume", "saving.resume", CHECKPOINTS),
    ("--convert-on-resume", "saving.resume_into_other_arm", CHECKPOINTS),
    ("--device", "device", MACHINE),
    ("--channels-last", "recipe.channels_last", MACHINE),
    ("--checkpoint-activations", "recipe.checkpoint_activations", MACHINE),
    ("--cudnn-benchmark", "recipe.cudnn_benchmark", MACHINE),
    ("--cuda-graph", "recipe.cuda_graph", MACHINE),
    ("--compile", "recipe.compile", MACHINE),
    ("--cpu-half", "cpu_half", MACHINE),
    ("--autocast-lists", "autocast_lists", MACHINE),
    ("--log-interval", "drain_every", MACHINE),
    ("--warmup-steps", "warmup_steps", MACHINE),
    ("--workers -j", "workers", MACHINE),
    ("--pin-memory", "pin_memory", MACHINE),
    ("--prefetch", "prefetch", MACHINE),
    ("--threads", "threads", MACHINE),
    ("--tf32", "tf32", MACHINE),
    ("--deterministic", "deterministic", MACHINE),
)
METAVARS: dict[str | type, str] = {
    "stall_timeout": "SECONDS",
    "eval_precision": "PRECISIONS",
    "allow_writes": "PATH",
    "recipe.data.name": "NAME",
    "recipe.model.arch": "NAME",
    "recipe.task": "NAME",
    "recipe.optimizer.name": "NAME",
    "recipe.data.dir": "DIR",
    "saving.resume": "auto|PATH",
    "device": "DEVICE",
    int: "N",
    float: "NUMBER",
}
OUTPUT_DTYPE = WordChoice(("fp32", "fp16", "bf16"), {"float32": "fp32", "float": "fp32", **HALF.others})
ARM_OPTIONS: dict[str, dict[str, Any]] = {  # of an arm, in the order of the help
    "--opt-level": {"type": LEVEL, "help": "opt level of Apex; needs no --backend"},
    "--engine": {
        "type": WordChoice(("auto", "nvidia", "compat")),
        "help": "Apex: the real one (nvidia), or ampcompare's own (compat)  [default: auto]",
    },
    "--dtype": {"type": HALF, "help": "native, half: 16-bit type  [default: fp16]"},
    "--loss-scale": {"metavar": "dynamic|NUMBER", "help": "Apex, half: loss scale"},
    "--keep-batchnorm-fp32": {"type": FLAG, "help": "Apex O2, O3: batch norm stays in fp32"},
    "--keep-fp32": {
        "metavar": "PATTERNS",
        "help": "Apex, native, half: modules in fp32, by name or type, joined by |",
    },
    "--master-weights": {"type": FLAG, "help": "Apex O2, O3, and half: fp32 copies of the weights"},
    "--cast-model-outputs": {"type": OUTPUT_DTYPE, "help": "Apex: type of the model's outputs"},
    "--min-loss-scale": {"metavar": "NUMBER", "help": "Apex: lower bound of a dynamic loss scale"},
    "--max-loss-scale": {"metavar": "NUMBER", "help": "Apex: upper bound of a dynamic loss scale"},
    "--bn-fp32/--no-bn-fp32": {"default": None, "help": "half: batch norm stays in fp32"},
    "--init-scale": {"metavar": "NUMBER", "help": "native, half: first value of a dynamic loss scale"},
    "--growth-factor": {"metavar": "NUMBER", "help": "native: factor when the loss scale grows"},
    "--backoff-factor": {"metavar": "NUMBER", "help": "native: factor after an overflow"},
    "--growth-interval": {"metavar": "STEPS", "help": "native, half: steps without overflow until it grows"},
}
ARM_FLAGS = {
    flag.partition("/")[0].removeprefix("--").replace("-", "_"): flag.partition("/")[0]
    for flag in ARM_OPTIONS
}


def _field_at_path(path: str) -> Any:
    """Return the pydantic field at a path such as `recipe.data.name`."""
    model: Any = RunConfig
    *parents, name = path.split(".")
    for parent in parents:
        model = model.model_fields[parent].annotation
    return model.model_fields[name]


def parameter_name_of_setting(path: str) -> str:
    """Return the name of the parameter that holds the option of a setting."""
    return path.replace(".", "__")


def _option_of_setting(flags: str, path: str, group: str) -> Callable[[Function], Function]:
    """Return the option of a setting. Bounds are left to the field, whose message names the setting."""
    field = _field_at_path(path)
    kind = type_inside_annotation(field.annotation)
    names = flags.split()
    settings: dict[str, Any] = {"metavar": METAVARS.get(path, METAVARS.get(kind))}
    if kind is bool:
        names[0] = f"{names[0]}/--no-{names[0].removeprefix('--')}"
    elif get_origin(kind) is Literal:
        settings["type"] = WordChoice(get_args(kind))
    else:
        settings["type"] = kind
    return option(
        *names,
        parameter_name_of_setting(path),
        group=group,
        default=None,
        help=_setting_help_text(field.description, field.default),
        **settings,
    )


def _setting_help_text(description: str | None, default: object) -> str:
    """Return the help of a setting with its default, unless that is to do nothing."""
    if default in (None, False, "none", ()):
        return description or ""
    return f"{description or ''}  [default: {'on' if default is True else default}]".strip()


# Parameters of `recipe_options`. Which of them act in a command stands in `settings/reads.py`.
SETTING_OPTIONS = (
    *("recipe_name", "size", "config_file", "overrides", "model_args", "guards"),
    *(parameter_name_of_setting(path) for _, path, _ in RECIPE_OPTIONS),
)


def recipe_options(*reads: CommandReads) -> Callable[[Function], Function]:
    """Return what adds the flags of all settings that a command reads, in one or several ways of it.

    These are the options of the settings, `--model-arg` and the guards, next to `--recipe`, `--size`, `--config` and
    `--set`, which name several or any of them.
    """
    paths = frozenset[str]().union(*(each.accepted_paths for each in reads))
    options = [
        option(
            "--recipe",
            "recipe_name",
            metavar="NAME|FILE",
            group=DATA,
            help="a complete, named configuration (see `list recipes`), or a YAML file of your own",
        ),
        option("--size", metavar="NAME", group=DATA, help="a smaller size of the recipe, such as small"),
        *(_option_of_setting(*row) for row in RECIPE_OPTIONS if row[1] in paths),
        option(
            "--model-arg",
            "model_args",
            multiple=True,
            metavar="NAME=VALUE",
            group=DATA,
            help="argument of the network; repeatable",
        ),
        *(_guard_options() if "guards" in paths else ()),
        option("--config", "-c", "config_file", type=FILE, group=SETTINGS, help="YAML file of settings"),
        option(
            "--set",
            "overrides",
            multiple=True,
            metavar="A.B=C",
            group=SETTINGS,
            help="any setting by its path, which `config show` lists: recipe.optimizer.nesterov=true; repeatable",
        ),
    ]
    return lambda function: add_options(options, function)


def _guard_options() -> tuple[Callable[[Function], Function], ...]:
    return (
        option(
            "--strict-guards",
            "guards",
            flag_value="strict",
            group=DIVERGENCE,
            help="treat AMP misuse in your code as an error",
        ),
        option(
            "--no-guards", "guards", flag_value="off", group=DIVERGENCE, help="do not look for AMP misuse"
        ),
    )


def add_output_options(function: Function) -> Function:
    """Add where results go and how much is printed."""
    options = [
        option(
            "--output-dir",
            "-o",
            type=FOLDER,
            group=OUTPUT,
            help="run directory  [default: runs/COMMAND-HASH]",
        ),
        option("--force", is_flag=True, group=OUTPUT, help="ignore records of earlier calls and run again"),
        option("--dry-run", is_flag=True, group=OUTPUT, help="print what would run, and exit"),
        json_option(),
        option(
            "--no-progress",
            is_flag=True,
            group=OUTPUT,
            help="no progress bars; a plain line each minute instead",
        ),
        option("--quiet", "-q", is_flag=True, group=OUTPUT, help="no progress and no notes on stderr"),
    ]
    return add_options(options, function)


def json_option() -> Callable[[Function], Function]:
    """Return the option `--json`."""
    text = "one JSON document on stdout instead of text"
    return option("--json", "as_json", is_flag=True, group=OUTPUT, help=text)


def margin_options(option_of: OptionOf) -> Callable[[Function], Function]:
    """Return what adds the margins of the verdicts to a command; the default is that of the function called."""
    options = [
        option(
            "--margin",
            callback=lambda context, parameter, value: parse_number_or_text(value),
            metavar="MARGIN",
            group=COMPARISON,
            help="equivalence margin of the metric: a number in its unit, such as 0.5 (pp of top-1), 10% (of the "
            "errors), 2sd (over seeds) or auto, the usual one of the metric and for top-1 the smaller of 0.5 and 10%; "
            "choose it before the runs  [default: auto]",
        ),
        option_of("--time-margin", metavar="PERCENT", group=COMPARISON),
    ]
    return lambda function: add_options(options, function)


def parse_number_or_text(value: str | None) -> float | str | None:
    """Return a number as a number, so that the command and Python ask for the same; any other text as it is."""
    try:
        return None if value is None else float(value)
    except ValueError:
        return value


def command_line_as_typed() -> str:
    """Return the command line of this process, as it would be typed, with placeholders for secrets."""
    return shlex.join(["ampcompare", *hide_secrets_in_words(sys.argv[1:])])


def stack_option(option_of: OptionOf, arm: str = "script") -> Callable[[Function], Function]:
    """Return what adds the option for other environments of Python and torch.

    Args:
        option_of: what makes an option of the command.
        arm: the one of the example.
    """
    added: Callable[[Function], Function] = option_of(
        "--stack",
        "stacks",
        multiple=True,
        metavar="NAME=COMMAND",
        group=ARMS,
        help="another environment, by what starts its Python: old=/envs/old/bin/python, or old='docker run IMAGE "
        f"python'; arms such as {arm}@old train there; repeatable",
    )
    return added


def first_weights_option(option_of: OptionOf) -> Callable[[Function], Function]:
    """Return what adds the option for the stack whose first weights all arms begin with."""
    added: Callable[[Function], Function] = option_of(
        "--first-weights",
        metavar="NAME",
        group=SCRIPT,
        help="with -- SCRIPT: the stack whose first weights all arms begin with, recorded there once for each seed",
    )
    return added


def add_arm_options(function: Function) -> Function:
    """Add `--backend` and the options of an arm."""
    for flag, settings in reversed(ARM_OPTIONS.items()):
        function = option(flag, group=ARMS, **settings)(function)
    text = "fp32, apex, native, half or another of `list arms`; its options follow"
    return option("--backend", metavar="NAME", group=ARMS, help=text)(function)


def rules_of_arm_options(arm: str) -> tuple[OptionRule, ...]:
    """Return what `--backend` and the options of an arm need and exclude; `arm` is the parameter of `--arm`."""
    flags = {"backend": "--backend", **ARM_FLAGS}
    return (
        *(
            rule_of_exclusion(flag, name, "--arm", arm, ", whose text has its options")
            for name, flag in flags.items()
        ),
        *(
            rule_of_need(flag, name, "--backend NAME", "backend", "opt_level", because=", whose option it is")
            for name, flag in ARM_FLAGS.items()
        ),
    )


def arm_from_flags(parameters: Mapping[str, Any]) -> str | None:
    """Return the arm that `--backend` and its options name, in its canonical form; None if they name none.

    What they need and exclude, `rules_of_arm_options` has.
    """
    options = {name: parameters[name] for name in ARM_FLAGS if parameters[name] is not None}
    backend = parameters["backend"] or ("apex" if options else None)  # --opt-level alone is of Apex
    return None if backend is None else str(Arm.make(backend, **options))
