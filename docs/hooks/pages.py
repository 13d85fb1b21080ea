"""Pages that mkdocs generates: tables from the program, links that leave docs/, and folders added to the navigation.

mkdocs calls the functions that begin with `on_`.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")
FOREIGN = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]+)"')
# Rank of a page in the search: questions before references, and measurements last. The first prefix counts.
BOOSTS = (
    ("errors/index.md", 1.0),
    ("errors/", 8.0),
    ("troubleshooting.md", 4.0),
    ("install.md", 8.0),
    ("benchmarks/", 0.2),
    ("examples/", 0.3),
    ("contributing/", 0.3),
    ("deviations", 0.3),
    ("engine-cost.md", 0.3),
    ("api.md", 0.3),
    ("commands.md", 0.5),
    ("settings.md", 0.5),
)
DECLARING = (
    *(
        "fp32",
        "apex:O1",
        "apex:O2",
        "apex:O3",
        "apex:O4",
        "apex:O5",
        "native:fp16",
        "native:bf16",
        "half",
        "half:bf16",
    ),
    *("half:bf16,masters=fp32", "half:bf16,kahan", "native:bf16,weights=bf16,state=fp32", "fsdp:bf16"),
)
log = logging.getLogger("mkdocs.hooks.pages")


def on_config(config: Any) -> Any:
    """Add pages of folders that grow, the address of the repository, and a choice of versions where there is one."""
    address = re.search(
        r'^ADDRESS = "(.+)"', (ROOT / "setup.py").read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    if address is not None:
        config["repo_url"] = address[1]
    if "MIKE_DOCS_VERSION" in os.environ:
        config["extra"]["version"] = {"provider": "mike"}
    named = set(_named(config["nav"]))
    for folder, title in (
        ("errors", "Error messages"),
        ("contributing", "Adding to it"),
        ("examples", "Examples"),
        ("benchmarks", "Measurements"),
        (".", "More"),
    ):
        pages = [
            path.relative_to(DOCS).as_posix() for path in sorted((DOCS / folder).glob("*.md"), key=_first)
        ]
        pages = [page for page in pages if page not in named]
        if pages:
            config["nav"].append({title: pages})
    return config


def _first(path: Path) -> tuple[bool, str]:
    """Order pages by name, after the index of their folder."""
    return path.name != "index.md", path.name


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in tables generated from the program, turn links that leave docs/ into plain text, and rank the page."""
    for prefix, boost in BOOSTS:
        if page.file.src_uri.startswith(prefix):
            page.meta["search"] = {"boost": boost}
            break
    for marker, make in (
        ("commands", command_reference),
        ("settings", settings_reference),
        ("guards", guards_table),
        ("roles", roles_table),
    ):
        comment = f"<!-- {marker} -->"
        if comment in markdown:
            markdown = markdown.replace(comment, make())
    return stay_inside(markdown, DOCS / page.file.src_uri)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Warn if a page fetches something from another host. A warning fails a strict build."""
    for address in FOREIGN.findall(output):
        log.warning("%s fetches %s", page.file.src_uri, address)
    return output


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from _named(value)
    else:
        for value in nav:
            yield from _named(value)


def stay_inside(markdown: str, source: Path) -> str:
    """Replace links to files of the repository that are not pages by their path in code type.

    Args:
        source: the file that `markdown` came from.
    """

    def replace(match: re.Match[str]) -> str:
        target = (source.parent / match[2]).resolve()
        if target.is_relative_to(DOCS) and target.is_file():
            return match[0]
        if not target.exists():
            return match[0]  # mkdocs warns of it
        path = target.relative_to(ROOT).as_posix() + ("/" if target.is_dir() else "")
        text = match[1].strip("`")
        return f"`{path}`" if text in (path.strip("/"), target.name, path) else f"{match[1]} (`{path}`)"

    return LINK.sub(replace, markdown)


def roles_table() -> str:
    """Return what some arms declare to hold and compute in which type."""
    from ampcompare.backends.arm import Arm

    rows = ["| arm | declares |", "|---|---|"]
    rows += [f"| `{text}` | {Arm.parse(text).roles} |" for text in DECLARING]
    return "\n".join(rows)


def command_reference() -> str:
    """Return a section for each command: its help, usage, options and the environment variable of each."""
    from ampcompare.cli import COMMANDS
    from ampcompare.cli.group import cli

    context = click.Context(cli, info_name="ampcompare")
    parts = []
    for name, summary in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        parts += [
            f"## ampcompare {name}",
            "",
            summary,
            "",
            *_body(command, click.Context(command, context, name)),
        ]
    return "\n".join(parts)


def _body(command: click.Command, context: click.Context) -> Iterator[str]:
    from ampcompare.cli.help import GROUPS, help_group_of

    usage = " ".join(command.collect_usage_pieces(context))
    yield from ("```text", f"{context.command_path} {usage}", "```", "")
    paragraphs = (command.help or "").strip().split("\n\n")
    for paragraph in paragraphs[1:]:
        yield from (_plain(paragraph), "")
    if examples := getattr(command, "examples", ()):
        yield from (
            "```text",
            *(line for question, answer in examples for line in (f"# {question}", answer)),
            "```",
            "",
        )
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    for group in GROUPS:
        if members := [option for option in options if help_group_of(option) == group]:
            yield from (f"**{group}**", "", "| option | meaning | environment |", "|---|---|---|")
            yield from (_row(option, context) for option in members)
            yield ""
    if command.epilog:
        yield from (_plain(command.epilog), "")


def _row(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None
    flags, text = record
    shown = ", ".join(f"`{flag.strip()}`" for flag in flags.split(", "))
    variable = f"`{option.envvar}`" if isinstance(option.envvar, str) else ""
    return f"| {shown} | {_cell(_plain(text))} | {variable} |"  # a bar inside of backticks divides no cells


def _plain(text: str) -> str:
    """Return help text on one line, safe in Markdown."""
    line = " ".join(text.split())
    return re.sub(r"(?<!`)([<>*_])(?!`)", r"\\\1", line)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def settings_reference() -> str:
    """Return a table of every setting of a run from the JSON Schema: path, accepted values, default and meaning."""
    from ampcompare.settings.config import RunConfig

    schema = RunConfig.model_json_schema()
    rows = ["| setting | takes | default | meaning |", "|---|---|---|---|"]
    for path, field in _fields(schema, schema):
        default = field.get("default")
        shown = "" if default is None else f"`{json.dumps(default)}`"
        rows.append(
            f"| `{path}` | {_takes(field)} | {shown} | {_cell(_plain(field.get('description', '')))} |"
        )
    return "\n".join(rows)


def guards_table() -> str:
    """Return a table of the guards: name, the mistake and what it does."""
    from ampcompare.guards import GUARDS

    rows = ["| guard | the mistake | what it does |", "|---|---|---|"]
    rows += [f"| `{guard.name}` | {guard.mistake} | {guard.matters} |" for guard in GUARDS.values()]
    return "\n".join(rows)


def _fields(
    schema: dict[str, Any], group: dict[str, Any], above: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in group["properties"].items():
        if "$ref" in field:
            inner = schema["$defs"][field["$ref"].rpartition("/")[2]]
            yield from _fields(schema, inner, f"{above}{name}.")
        else:
            yield above + name, field


def _takes(field: dict[str, Any]) -> str:
    """Return the type of a field with its bounds, in words."""
    if "anyOf" in field:
        return " or ".join(_takes(choice) for choice in field["anyOf"])
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    if "prefixItems" in field:
        return f"a list of {len(field['prefixItems'])}: {_takes(field['prefixItems'][0])}"
    words = {"null": "nothing", "boolean": "true, false", "string": "text", "object": "names and values"}
    words["array"] = "a list"
    kind = words.get(field["type"], field["type"]) if "type" in field else "settings of its own"
    signs = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    bounds = [f"{sign} {field[bound]:g}" for bound, sign in signs if bound in field]
    return f"{kind} {' and '.join(bounds)}" if bounds else kind
