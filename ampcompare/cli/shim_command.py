"""`ampcompare shim`: make `from apex import amp` work in an environment, and take it back."""

from dataclasses import asdict

import click

from ampcompare.base.shim.switch import ShimStatus, shim_status, switch_shim_off, switch_shim_on
from ampcompare.cli.forms import CommandForm, default_form
from ampcompare.cli.help import Command, option
from ampcompare.cli.output import print_json
from ampcompare.cli.shared_options import json_option
from ampcompare.cli.values import WordChoice

ON = CommandForm(
    "shim on",
    frozenset({"action", "answered", "as_json"}),
    lambda values: values["action"] == "on",
    advice="write: ampcompare shim on --for LIBRARY",
)
FORMS = (ON, default_form(("action", "as_json")))


@click.command(
    "shim",
    cls=Command,
    forms=FORMS,
    examples=[
        (
            "`from apex import amp` in your scripts, whether Apex lacks it or is not there:",
            "ampcompare shim on",
        ),
        ("What it adds here:", "ampcompare shim status"),
        ("As it was before:", "ampcompare shim off"),
    ],
    epilog="Exit codes: 0 done; 2 usage; 4 there is no torch, another project is installed as apex, or site-packages "
    "cannot be written.",
)
@option(
    "--for",
    "answered",
    multiple=True,
    metavar="LIBRARY",
    help="with on: answer imports of this library too, by the name that it is imported by; repeatable",
)
@json_option()
@click.argument("action", metavar="on|off|status", type=WordChoice(["on", "off", "status"]))
def command(asked: CommandForm, action: str, answered: tuple[str, ...], as_json: bool) -> int:
    """Make `from apex import amp` work in this environment, or undo that.

    `on` writes two files into site-packages, which `off` removes. Next to NVIDIA's Apex without amp they add amp,
    parallel and fp16_utils for everybody. Where there is no Apex your own code gets ampcompare's engine, and libraries
    that look for Apex, such as transformers, Megatron and timm, still find none.
    """
    if asked is ON:
        status = switch_shim_on(answered)
    else:
        status = switch_shim_off() if action == "off" else shim_status()
    if as_json:
        found = {**asdict(status.apex), "path": None if status.apex.path is None else str(status.apex.path)}
        print_json({**asdict(status), "folder": str(status.folder), "apex": found}, indent=None)
    else:
        for line in _status_lines(status):
            click.echo(line)
    return 0


def _status_lines(status: ShimStatus) -> list[str]:
    """Return what a user should know of the shim, a sentence for each line."""
    apex = (
        "none is installed"
        if status.apex.kind == "absent"
        else f"{status.apex.path}, version {status.apex.version}"
    )
    adds = "adds" if status.on else "would add"
    lines = [f"shim: {'on' if status.on else 'off'} in {status.folder}", f"apex: {apex}"]
    if not status.adds:
        lines.append(
            f"{adds}: nothing, " + ("since apex.amp is there" if status.apex.has_amp else status.apex.reason)
        )
    elif status.adds == ("apex",):
        libraries = f"; also of {', '.join(status.answered)}" if status.answered else ""
        lines.append(
            f"{adds}: apex, for imports of your own code{libraries}; libraries and find_spec find none"
        )
    else:
        lines.append(f"{adds}: {', '.join(status.adds)}, for everybody; the rest of apex stays NVIDIA's")
    return lines
