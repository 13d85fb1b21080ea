"""The help of commands: groups, the short and the long one, examples that parse, and completion by the shell."""

import contextlib
import functools
import io
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from ampcompare import __version__
from ampcompare.cli import COMMANDS, main
from ampcompare.cli.group import cli
from ampcompare.cli.help import GROUPS, OTHER, Command, help_group_of
from ampcompare.cli.values import WordChoice
from ampcompare.tasks.catalog import BUILTIN_MODELS

Call = Callable[..., Any]
# Commands of so many options that -h shows the common ones alone.
WIDE = ("run", "compare", "find-batch", "explain", "diagnose", "profile")
ENTRY = re.compile(r"^  (?:-\w, )?--[\w\[\]-]+", flags=re.MULTILINE)


def _command(name: str) -> Command:
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, Command)
    return command


@functools.cache
def _help(name: str, flag: str) -> str:
    """Return what a command prints at 80 columns."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", "80")
        assert main([name, flag]) == 0
    return out.getvalue()


def _sections(text: str) -> dict[str, str]:
    parts = re.split(r"^(\S.*):\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_in_one_group(name: str) -> None:
    """`--help` has the line of the command and each option with its help once, under a group in the fixed order; a
    command of many options leaves none over."""
    text = _help(name, "--help")
    assert (_command(name).help or "").splitlines()[0] == COMMANDS[name]
    assert COMMANDS[name] in text
    sections = _sections(text)
    titles = [title for title in sections if title != "Examples"]
    assert titles == [group for group in GROUPS if group in titles]
    if name in WIDE:
        assert OTHER not in titles
    for option in _command(name).params:
        if not isinstance(option, click.Option):
            continue
        assert option.help, option.opts
        flag = max(option.opts, key=len).removeprefix("--")
        entry = re.compile(rf"^  (-\w, )?--{flag}\b(?!-)", re.MULTILINE)
        found = [title for title in titles if entry.search(sections[title])]
        assert found == [help_group_of(option)], flag


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns(name: str, flag: str) -> None:
    """No line is wider than the terminal, and no help says `of apex`, a default of none, or the name of a YAML key."""
    text = _help(name, flag)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert not re.search(r"of apex|\[default: (none|None)\]", text)
    assert not re.search(r"\b(lr_base|layer_lr|on_nan|lr_base_batch|batch_size|drain_every)\b(?!=)", text)


@pytest.mark.parametrize("name", WIDE)
def test_the_short_help_is_short(name: str) -> None:
    """`-h` shows at most 15 options, two or three examples, and where the others are."""
    text = _help(name, "-h")
    assert 8 <= len(ENTRY.findall(text)) <= 15
    assert len(text.splitlines()) < 55
    assert text.endswith("--help lists all options.\n")
    assert len(_help(name, "--help")) > 2 * len(text)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_parse(name: str) -> None:
    """The example of each question is a command line that the program reads, and its model exists."""
    command = _command(name)
    assert 2 <= len(command.examples) <= 3
    for question, line in command.examples:
        assert question.endswith((":", "?"))
        program, called, *words = shlex.split(line.partition(">")[0].rpartition("|")[2])
        assert (program, called) == ("ampcompare", name)
        command.make_context(name, words)
        if "--arch" in words:
            assert words[words.index("--arch") + 1] in {*BUILTIN_MODELS, "resnet18", "resnet50"}


def test_the_first_page(capsys: pytest.CaptureFixture[str]) -> None:
    """-h and --help of the program are one page of 80 columns with every command, and click gives the same page."""
    assert main(["-h"]) == 0
    page = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == page
    assert cli.get_help(click.Context(cli)) + "\n" == page
    assert "130 interrupted" in page
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", page, flags=re.MULTILINE)
    assert [line for line in page.splitlines() if len(line) > 81] == []
    for line in re.findall(r"^    ampcompare (.*)$", page, flags=re.MULTILINE):
        called, *words = shlex.split(line)
        _command(called).make_context(called, words)


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_the_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([flag]) == 0
    assert capsys.readouterr().out == f"ampcompare, version {__version__}\n"


@pytest.mark.parametrize(
    ("value", "word"),
    [("O2", "O2"), ("o2", "O2"), ("Apex-DDP", "apex-ddp"), ("apex_ddp", "apex-ddp"), ("bfloat16", "bf16")],
)
def test_choices_are_read_in_any_case(value: str, word: str) -> None:
    """Case and underscores do not matter, and further words stand for a choice."""
    assert WordChoice(["O2", "apex-ddp", "bf16"], {"bfloat16": "bf16"}).convert(value, None, None) == word


@pytest.mark.parametrize(
    ("words", "begun", "some"),
    [
        ([], "co", {"compare", "convert", "config"}),
        (["run"], "--opt", {"--opt-level", "--optimizer"}),
        (["run", "--engine"], "nv", {"nvidia"}),
    ],
)
def test_the_shell_completes(words: list[str], begun: str, some: set[str]) -> None:
    """Commands, flags and choices are offered by their beginning; paths are left to the shell."""
    shell = ShellComplete(cli, {}, "ampcompare", "_AMPCOMPARE_COMPLETE")
    assert some <= {item.value for item in shell.get_completions(words, begun)}
    assert [(item.value, item.type) for item in shell.get_completions(["judge"], "a/b")] == [("a/b", "file")]


@pytest.mark.parametrize(
    ("words", "arms", "reference"),
    [
        (["--arm", "fp32,bf16,O2"], {"fp32", "native:bf16", "apex:O2"}, "fp32"),
        (["--arm", "bf16", "--arm", "O2", "--reference", "o2"], {"native:bf16", "apex:O2"}, "apex:O2"),
        (["--arm", "bf16", "--reference", "O2"], {"native:bf16", "apex:O2"}, "apex:O2"),
        (["--backend", "apex", "--opt-level", "O2"], {"fp32", "apex:O2"}, "fp32"),
        (["--opt-level", "o3", "--reference", "amp"], {"native:fp16", "apex:O3"}, "native:fp16"),
        (["--backend", "fp32"], {"fp32"}, "fp32"),
    ],
)
def test_arms_of_a_comparison(words: list[str], arms: set[str], reference: str) -> None:
    """Every way to name arms gives the same rows, and the reference is added if it is none of them."""
    from ampcompare.cli.compare_command import command, compare_options_from_parameters
    from ampcompare.experiment.compare import plan_comparison

    with command.make_context("compare", [*words, "--device", "cpu"]) as context:
        plan = plan_comparison(compare_options_from_parameters(context.params)).plan
    assert (set(plan.arms), plan.reference, plan.seeds) == (arms, reference, (0, 1, 2))


def test_old_names_of_recipes_and_studies(call: Call, tmp_path: Path) -> None:
    """`seeds/...` still names the recipes of the articles, and help shows the new name alone."""
    plan = ("--dry-run", "--json", "--no-preflight")
    old, new = (
        call("compare", "--recipe", f"{folder}/r18-leaves", "--size", "small", *plan).json()["cells"]
        for folder in ("seeds", "articles")
    )
    assert sorted(cell["cell"] for cell in old) == sorted(cell["cell"] for cell in new)
    assert "seeds/" not in call("list", "recipes").out
