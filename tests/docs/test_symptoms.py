"""The page of symptoms and messages: the words of users, commands that exist, and a site whose search finds them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import click
import pytest

from ampcompare.cli import cli
from ampcompare.source.lint.catalog import CODES

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, flags=re.DOTALL | re.MULTILINE))
ASKED = (
    "loss scale stuck at 1",
    "apex.amp module not found",
    "GradScaler with LBFGS",
    "bf16 slower than fp16",
    "grad is None after unscale",
    "No inf checks were recorded",
    "Attempting to unscale FP16 gradients",
    "unscale_() has already been called",
    "ZeroDivisionError float division by zero",
    "loss is NaN with amp",
)


def _commands(section: str) -> list[str]:
    lines = [line for block in re.findall(r"```\n(.*?)```", section, flags=re.DOTALL) for line in block.splitlines()]
    parts = [part for line in lines for part in line.partition("  #")[0].split("&&")]
    return [part.strip() for part in parts if part.strip()]


@pytest.mark.parametrize("symptom", SECTIONS)
def test_each_symptom_has_a_command_that_is_understood(symptom: str) -> None:
    """Each section has a command, whose options exist, and names only codes of lint that exist."""
    commands = _commands(SECTIONS[symptom])
    assert commands
    for line in commands:
        program, name, *words = shlex.split(line)
        assert program == "ampcompare"
        command = cli.get_command(click.Context(cli), name)
        assert command is not None, name
        command.make_context(name, words, resilient_parsing=False)
    assert set(re.findall(r"AMP\d{3}", SECTIONS[symptom])) <= set(CODES)


@pytest.mark.slow
def test_the_search_finds_each_symptom(tmp_path: Path) -> None:
    """In the index of the built site a section holds all words of the question, and the page is opened as a file."""
    mkdocs = pytest.importorskip("mkdocs.commands.build")
    config = pytest.importorskip("mkdocs.config")
    pytest.importorskip("material")
    (tmp_path / "docs" / "javascripts").mkdir(parents=True)
    shutil.copy(ROOT / "docs/javascripts/iframe-worker.js", tmp_path / "docs/javascripts")
    page = re.sub(r"\]\((?!https?:)[^)]*\)", "](index.md)", TEXT)
    (tmp_path / "docs" / "index.md").write_text(page, encoding="utf-8")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    plugins = re.search(r"^plugins:\n((?:  - \w+.*\n)+?)(?=  - mkdocstrings)", settings, flags=re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: x\nuse_directory_urls: false\ntheme: { name: material, font: false }\n"
        f"extra: {{ polyfills: [javascripts/iframe-worker.js] }}\nplugins:\n{plugins[1]}",
        encoding="utf-8",
    )
    mkdocs.build(config.load_config(str(tmp_path / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    index = json.loads((tmp_path / "site/search/search_index.json").read_text(encoding="utf-8"))
    words = [
        set(re.findall(r"\w+", f"{one['title']} {one['text']}".lower()))
        for one in index["docs"]
        if "#" in one["location"]
    ]
    for question in ASKED:
        assert any(set(re.findall(r"\w+", question.lower())) <= one for one in words), question
    assert (tmp_path / "site/search/search_index.js").read_text(encoding="utf-8").startswith("var __index = ")
    assert "//unpkg.com" not in (tmp_path / "site/index.html").read_text(encoding="utf-8")
