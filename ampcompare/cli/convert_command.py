"""`ampcompare convert`: checkpoints between Apex and torch.amp, and what a checkpoint holds."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ampcompare.api.migration import convert_checkpoint
from ampcompare.base.environment.extras import require_torch
from ampcompare.base.errors import ConfigError
from ampcompare.base.option_rules import OptionRule
from ampcompare.cli.forms import CommandForm, default_form, form_asked_by_parameter
from ampcompare.cli.help import Command, make_option_from_signature, option
from ampcompare.cli.output import print_json
from ampcompare.cli.shared_options import json_option
from ampcompare.cli.values import LEVEL

if TYPE_CHECKING:
    from ampcompare.checkpoints.convert.convert import Target

convert_option = make_option_from_signature(convert_checkpoint)

INSPECT = form_asked_by_parameter("--inspect", "inspect", ("source", "as_json"), ", which writes nothing")
CONVERT = default_form(("source", "target", "to", "opt_level", "save_apex_format", "static_scale", "as_json"))
FORMS = (INSPECT, CONVERT)
NEEDS_TARGET = OptionRule(
    "convert",
    "needs OUT and --to native or --to apex",
    "give both, or --inspect",
    lambda values: not values["inspect"] and (values["target"] is None or values["to"] is None),
)
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar", ".pkl", ".pickle")
MAX_NAMED = 20


@click.command(
    "convert",
    cls=Command,
    forms=FORMS,
    rules=(NEEDS_TARGET,),
    examples=[
        ("What is inside a checkpoint:", "ampcompare convert last.pt --inspect"),
        ("From apex.amp to torch.amp:", "ampcompare convert apex.pt amp.pt --to native"),
    ],
)
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@click.argument("target", metavar="[OUT]", required=False, type=click.Path(path_type=Path))
@convert_option("--to", help="target format of OUT: torch.amp or apex.amp")
@convert_option(
    "--opt-level", type=LEVEL, help="level of the Apex side  [default: inferred from IN, else O1]"
)
@convert_option(
    "--save-apex-format", help="write exactly what an Apex script saves: model, optimizer, amp, epoch"
)
@convert_option("--static-scale", help="with --to native: the loss scale of IN was a number, not dynamic")
@option("--inspect", is_flag=True, help="show what IN contains, and write nothing")
@json_option()
def command(
    asked: CommandForm,
    source: Path,
    target: Path | None,
    to: Target | None,
    opt_level: str | None,
    save_apex_format: bool,
    static_scale: bool | None,
    inspect: bool,  # which asks for a form
    as_json: bool,
) -> int:
    """Convert a checkpoint between Apex and torch.amp, or inspect it.

    IN is a checkpoint of ampcompare, of a script with apex.amp, FP16_Optimizer or torch.amp, of timm, mmengine,
    Lightning, Megatron, DeepSpeed or fairseq. OUT has the layout of IN, with the other kind of loss scaler; what cannot
    be converted is reported. No code in IN is executed.
    """
    require_torch()
    if source.is_dir():
        raise ConfigError(_why_folder_is_no_checkpoint(source))
    if asked is INSPECT:
        from ampcompare.checkpoints.convert.inspect import inspect_file, inspection_lines

        inspection = inspect_file(source)
        _print_lines_or_json(asdict(inspection), inspection_lines(inspection), as_json)
        return 0
    assert target is not None
    assert to is not None
    from ampcompare.checkpoints.convert.convert import convert_file
    from ampcompare.checkpoints.convert.inspect import conversion_report_lines

    result = convert_file(
        source,
        target,
        to,
        opt_level=opt_level,
        legacy_layout=save_apex_format,
        static_scale=static_scale or None,
    )
    document = {
        "in": str(source),
        "out": str(target),
        "from": result.source,
        "to": to,
        "opt_level": result.level,
        "arm": result.arm,
        "changed": result.changed,
        "lost": result.lost,
        "notes": result.notes,
    }
    _print_lines_or_json(document, conversion_report_lines(document), as_json)
    return 0


def _why_folder_is_no_checkpoint(folder: Path) -> str:
    """Return that a checkpoint is a file, and the names of those in a folder, two levels deep."""
    try:
        files = sorted(path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_file())
    except OSError as error:
        return f"{folder} is a folder that cannot be read: {error.strerror}"
    found = [str(path.relative_to(folder)) for path in files if path.name.endswith(SUFFIXES)]
    if any(path.name.endswith(".distcp") for path in files):
        return (
            f"{folder} is a checkpoint of torch.distributed.checkpoint, of which each file is a part; make one file of "
            f"it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} one.pt"
        )
    if not found:
        names = ", ".join(SUFFIXES)
        return f"{folder} is a folder, but a checkpoint is a file, and none of {names} is in it"
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"{folder} is a folder, but a checkpoint is a file; name one of its {', '.join(found[:MAX_NAMED])}{more}"


def _print_lines_or_json(document: dict[str, Any], lines: list[str], as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        click.echo("\n".join(lines))
