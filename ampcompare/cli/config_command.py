"""`ampcompare config`: the settings of a command, and where each came from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from ampcompare.base.option_rules import refuse_broken_rules
from ampcompare.cli.forms import AllNamesBut, CommandForm, default_form
from ampcompare.cli.help import Command, option
from ampcompare.cli.output import print_json
from ampcompare.cli.shared_options import json_option
from ampcompare.cli.values import WordChoice

if TYPE_CHECKING:
    from ampcompare.experiment.sources import SettingsSources


SCHEMA = CommandForm(
    "config schema", frozenset({"what", "as_json"}), lambda values: values["what"] == "schema"
)
FORMS = (SCHEMA, default_form(AllNamesBut(())))


@click.command(
    "config",
    cls=Command,
    forms=FORMS,
    examples=[
        ("Where each setting of a recipe comes from:", "ampcompare config show --origin --recipe digits"),
        ("The settings of a file, as run would use them:", "ampcompare config show --for run -c mine.yaml"),
        ("For the editor:", "ampcompare config schema > ampcompare.schema.json"),
    ],
    context_settings={"ignore_unknown_options": True},
)
@click.argument("what", type=WordChoice(["show", "schema"]))
@option("--origin", is_flag=True, help="where each value came from")
@option(
    "--for",
    "name",
    type=WordChoice(["run", "compare"]),
    default="compare",
    show_default=True,
    help="the command whose options follow and whose environment variables apply",
)
@json_option()
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context,
    asked: CommandForm,
    what: str,  # which asks for a form
    origin: bool,
    name: str,
    as_json: bool,
    options: tuple[str, ...],
) -> int:
    """Show where each setting came from; print the schema of files.

    `show` takes the options of run or compare (--recipe, --config, --set, --lr ...), and prints the resulting settings
    as YAML that --config accepts. `schema` is for editors: put `# yaml-language-server: $schema=FILE` into the first
    line of a file of settings.
    """
    if asked is SCHEMA:
        from ampcompare.settings.file import settings_file_schema

        print_json(settings_file_schema())
        return 0
    sources, matrix = _settings_sources_and_matrix(context, name, list(options))
    if as_json:
        document: dict[str, Any] = {**matrix, "settings": sources.config.model_dump(mode="json")}
        print_json({**document, "origin": sources.resolved.origins} if origin else document)
    else:
        click.echo(_settings_yaml(sources, matrix, origin=origin), nl=False)
    return 0


def _settings_sources_and_matrix(
    context: click.Context, name: str, options: list[str]
) -> tuple[SettingsSources, dict[str, Any]]:
    """Return what the options of a command come to, and what it would cross them with."""
    from ampcompare.cli.compare_command import compare_options_from_parameters
    from ampcompare.cli.run_command import settings_sources_from
    from ampcompare.experiment.compare import requested_or_default_seeds_text
    from ampcompare.experiment.sources import collect_settings, matrix_rows
    from ampcompare.settings.reads import TRAIN

    assert context.parent is not None
    group = context.parent.command
    assert isinstance(group, click.Group)
    other = group.get_command(context.parent, name)
    assert isinstance(other, Command)
    try:
        made = other.make_context(name, options, parent=context.parent)
    except click.UsageError as error:
        hint = "; the schema of files: ampcompare config schema" if "--schema" in options else ""
        raise click.UsageError(
            f"{error.format_message().rstrip('.')}. What follows show are options of {name}{hint}.", context
        ) from None
    with made as inner:
        refuse_broken_rules(other.rules, inner.params)
        if name == "run":
            return settings_sources_from(inner.params), {}
        compare = compare_options_from_parameters(inner.params)
        sources = collect_settings(compare.settings, TRAIN)
        rows = matrix_rows(
            sources,
            arms=compare.arms,
            reference=compare.reference,
            sweep=compare.sweep,
            stacks=compare.stacks,
        )
        seeds = requested_or_default_seeds_text(compare, sources)
        return sources, {"rows": [{"arm": row.arm_with_stack, **row.varied} for row in rows], "seeds": seeds}


def _settings_yaml(sources: SettingsSources, matrix: Mapping[str, Any], *, origin: bool) -> str:
    """Return YAML with a remark behind each value that says where it came from."""
    import yaml

    values = sources.config.model_dump(mode="json", exclude={"arm"} if matrix else None)
    lines = [*_yaml_lines(values, "", sources.resolved.origins if origin else {}, 0)]
    if matrix:
        lines += yaml.safe_dump(dict(matrix), sort_keys=False, allow_unicode=True, width=1000).splitlines()
    return "\n".join(lines) + "\n"


def _yaml_lines(values: Mapping[str, Any], above: str, origins: Mapping[str, str], depth: int) -> list[str]:
    lines = []
    for name, value in values.items():
        path, indent = f"{above}{name}", "  " * depth
        if isinstance(value, dict) and value:
            lines += [f"{indent}{name}:", *_yaml_lines(value, f"{path}.", origins, depth + 1)]
            continue
        text = f"{indent}{name}: {json.dumps(value)}"  # JSON is YAML
        lines.append(f"{text}  # {origins[path]}" if path in origins else text)
    return lines
