"""`ampcompare exec`: run an unmodified legacy script on ampcompare's engine."""

from __future__ import annotations

import os

import click

from ampcompare.base.errors import ConfigError
from ampcompare.cli.help import Command, option
from ampcompare.cli.values import ARM, FILE, LEVEL, Choice

__all__ = ["command"]


@click.command(
    "exec",
    cls=Command,
    examples=[
        ("A legacy script, unchanged:", "ampcompare exec train.py --epochs 1"),
        ("On a laptop, with a record of each step:", "ampcompare exec --device cpu --record r.jsonl train.py"),
    ],
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: the script's own; 2 no such script or module; 4 the environment cannot run these options.",
)
@option(
    "--engine",
    type=Choice(["compat", "nvidia"]),
    default="compat",
    show_default=True,
    help="what `import apex` means: ampcompare's own engine, or the real Apex",
)
@option("--opt-level", type=LEVEL, help="override the script's opt level")
@option("--arm", type=ARM, help="run the script under this arm: fp32, bf16, native:fp16, half, O2")
@option("--seed", type=int, metavar="N", help="seed Python, NumPy and torch before the script starts; with --arm")
@option("--max-steps", type=click.IntRange(1), metavar="N", help="end after N steps; with --arm and --record")
@option("--record", type=FILE, help="record every backward pass and step, for `ampcompare report FILE`")
@option("--device", type=Choice(["cpu"]), help="run the script's CUDA calls on the CPU: a smoke test")
@option("--compat-torch", is_flag=True, help="restore removed and changed APIs of torch, numpy and Python")
@option("--strict-guards", "guards", flag_value="strict", help="treat mistakes in the use of amp as errors")
@option("--no-guards", "guards", flag_value="off", help="do not check for mistakes in the use of amp")
@option("--module", "-m", is_flag=True, help="SCRIPT is the name of a module, as with python -m")
@click.argument("script", metavar="SCRIPT", type=FILE)
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    engine: str,
    opt_level: str | None,
    arm: str | None,
    seed: int | None,
    max_steps: int | None,
    record: str | None,
    device: str | None,
    compat_torch: bool,
    guards: str | None,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run an unmodified Apex script on ampcompare.apex.

    Everything after SCRIPT is passed to the script. With several processes:
    torchrun --nproc-per-node 2 -m ampcompare exec SCRIPT
    """
    # torch.distributed.launch puts the script's --local-rank before the command.
    parent = click.get_current_context().parent
    local_rank = parent.params.get("local_rank") if parent is not None else None
    if local_rank is not None:
        arguments = (f"--local-rank={local_rank}", *arguments)
    if arm is not None and opt_level is not None:
        raise ConfigError(
            f"--arm {arm} already sets the opt level, and --opt-level {opt_level} sets it too; give one of them"
        )
    from ampcompare.script.legacy.execute import execute
    from ampcompare.script.legacy.settings import ExecSettings
    from ampcompare.script.legacy.target import Target, script_target

    target = Target(script, list(arguments), is_module=True) if module else script_target(script, list(arguments))
    settings = ExecSettings(
        engine=engine,
        opt_level=opt_level,
        arm=arm,
        seed=seed,
        max_steps=max_steps,
        watch=arm is not None and record is not None,
        record=None if record is None else os.path.abspath(record),  # the script may change its folder
        device=device,
        compat_torch=compat_torch,
        guards=guards or "warn",
        name=script,
        arguments=arguments,
    )
    if arm is None:
        return execute(target, settings)
    from ampcompare.script.prepare import run_script

    return run_script(target, settings)
