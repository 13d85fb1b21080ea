"""`ampcompare replay`: one step, judged by fp64."""

from __future__ import annotations

from pathlib import Path

import click

from ampcompare.base.errors import ConfigError
from ampcompare.cli.help import COMPARISON, option
from ampcompare.cli.launching import leave_block_at_signals
from ampcompare.cli.output import print_document, print_folded_on_stderr, print_json, text_width
from ampcompare.cli.settings import ScriptCommand
from ampcompare.cli.shared_options import json_option
from ampcompare.cli.values import FILE


@click.command(
    "replay",
    cls=ScriptCommand,
    examples=[
        (
            "Keep a step, and compare settings:",
            "ampcompare replay capsule.pt --change onednn=off --change threads=2",
        ),
        (
            "Is another torch the same training?",
            "ampcompare replay capsule.pt --stack new=/envs/new/bin/python",
        ),
        ("Is my rewritten model the same function?", "ampcompare replay capsule.pt -- new_train.py"),
    ],
    epilog="Exit codes: 0 noise; 1 another function, or less exact; 2 usage; 3 it cannot be told, or failed; "
    "4 the environment cannot.",
)
@click.argument("capsule", metavar="CAPSULE", type=FILE)
@option(
    "--change", "changes", multiple=True, metavar="NAME=VALUE", group=COMPARISON,
    help="a setting to repeat the step with: onednn=off, threads=N, sdpa=math, compile=inductor, tf32=on, "
    "deterministic=on, denormals=flushed, arm=bf16; repeatable, each alone",
)  # fmt: skip
@option(
    "--stack", "stacks", multiple=True, metavar="NAME=COMMAND", group=COMPARISON,
    help="another environment to repeat it in, by what starts its Python",
)  # fmt: skip
@json_option()
def command(
    script: list[str] | None, capsule: str, changes: tuple[str, ...], stacks: tuple[str, ...], as_json: bool
) -> int:
    """Judge by fp64 whether one step is the same after a change.

    CAPSULE is a step that `ampcompare exec --capsule STEP train.py` has kept. Its script is started again, as it is and
    with each change, and each module is compared with itself in fp64: another function, less exact, or noise. A script
    after -- stands for another version of it.
    """
    from ampcompare.base.environment.extras import require_torch
    from ampcompare.experiment.replay import read_capsule_facts, replay, replay_variants_of_changes
    from ampcompare.results.report.documents.replay import replay_document
    from ampcompare.settings.script import script_config
    from ampcompare.settings.stack import parse_stacks

    require_torch()
    facts = read_capsule_facts(Path(capsule))
    own = [*(["-m"] if facts["is_module"] else []), facts["script"], *facts["arguments"]]
    sides = replay_variants_of_changes(changes, parse_stacks(stacks), script, own)
    try:
        config = script_config(own)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; the capsule was kept there, so call replay where its script is"
        ) from None
    with leave_block_at_signals():
        found = replay(
            Path(capsule), facts, sides, config, lambda line: print_folded_on_stderr(f"ampcompare: {line}")
        )
    if as_json:
        print_json([one.data() for one in found])
    else:
        print_document(replay_document(found), width=text_width())
    return max(one.exit_code for one in found)
