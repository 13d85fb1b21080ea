"""`ampcompare exec`: an unmodified legacy script on our engine."""

from __future__ import annotations

import os

import click

__all__ = ["command"]


@click.command(
    "exec",
    context_settings={"allow_interspersed_args": False},
    epilog="Exit codes: the script's own; 2 there is no such script or module; 4 the environment cannot do it.",
)
@click.option(
    "--engine",
    type=click.Choice(["compat", "nvidia"]),
    default="compat",
    show_default=True,
    help="what stands behind `import apex`: this package's own engine, or the real Apex",
)
@click.option("--opt-level", type=click.Choice(["O0", "O1", "O2", "O3"]), help="instead of the one the script asks for")
@click.option("--record", metavar="FILE", help="write every backward pass and step there, for `ampcompare report FILE`")
@click.option("--device", type=click.Choice(["cpu"]), help="run what the script does on CUDA on the CPU: a smoke test")
@click.option("--compat-torch", is_flag=True, help="mend what changed in torch and Python since the script was written")
@click.option(
    "--strict-guards", "guards", flag_value="strict", help="a mistake in the use of amp is an error at its line"
)
@click.option("--no-guards", "guards", flag_value="off", help="do not look for mistakes in the use of amp")
@click.option("--module", "-m", is_flag=True, help="SCRIPT is the name of a module, as with python -m")
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", metavar="[ARGS]...", nargs=-1, type=click.UNPROCESSED)
def command(
    engine: str,
    opt_level: str | None,
    record: str | None,
    device: str | None,
    compat_torch: bool,
    guards: str | None,
    module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run an unmodified Apex script on ampcompare.apex.

    Everything after SCRIPT belongs to the script. torchrun goes in front:
    torchrun --nproc-per-node 2 -m ampcompare exec SCRIPT
    """
    # torch.distributed.launch means the script with the --local-rank that stands before the command.
    parent = click.get_current_context().parent
    local_rank = parent.params.get("local_rank") if parent is not None else None
    if local_rank is not None:
        arguments = (f"--local-rank={local_rank}", *arguments)
    from ampcompare.legacy.execute import execute
    from ampcompare.legacy.settings import ExecSettings
    from ampcompare.legacy.target import Target, script_target

    target = Target(script, list(arguments), is_module=True) if module else script_target(script, list(arguments))
    settings = ExecSettings(
        engine=engine,
        opt_level=opt_level,
        record=None if record is None else os.path.abspath(record),  # the script may go to another folder
        device=device,
        compat_torch=compat_torch,
        guards=guards or "warn",
        name=script,
        arguments=arguments,
    )
    return execute(target, settings)
