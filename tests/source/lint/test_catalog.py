"""The catalog: every mistake has its texts, its pair of examples, and its section in the documentation."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from ampcompare.guards import GUARDS
from ampcompare.source.lint.catalog import BY_NAME, CODES, GROUPS, MISTAKES
from ampcompare.source.lint.report import level_of_code

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "lint" / "codes.md").read_text(encoding="utf-8")
HOOK = ROOT / "docs" / "hooks" / "lint_codes.py"
COUNTED = re.compile(r"(\d+)(?: \w+)? mistakes\]\([\w/.]*lint/index\.md")
SECTION = re.compile(r"^### (AMP\d{3}): ([\w-]+)$\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    """The module that mkdocs calls, and that writes the list."""
    spec = importlib.util.spec_from_file_location("site_lint_codes", HOOK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(hook: ModuleType) -> str:
    """The page as the site has it."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri="lint/codes.md"))
    text: str = hook.on_page_markdown(PAGE, page=page)
    return text


def test_codes_and_names_are_unique() -> None:
    """No code and no name has two meanings, and each code belongs to a group."""
    assert len(BY_NAME) == len(MISTAKES)
    assert len(CODES) == sum(bool(mistake.code) for mistake in MISTAKES)
    assert {code[:4] for code in CODES} == set(GROUPS)


def test_guards_are_in_the_catalog() -> None:
    for guard in GUARDS.values():
        mistake = BY_NAME[guard.name]
        assert (guard.mistake, guard.matters, guard.remedy) == (
            mistake.mistake,
            mistake.matters,
            mistake.remedy,
        )
    assert {mistake.guard for mistake in MISTAKES if mistake.guard} <= set(GUARDS)


def test_each_mistake_has_its_section(site: str) -> None:
    """The site has the texts and both examples of each mistake, and no section of a code that was dropped."""
    sections = SECTION.findall(site)
    assert [code for code, _, _ in sections] == sorted(CODES)
    for code, name, text in sections:
        mistake = CODES[code]
        assert name == mistake.name
        assert not [
            part
            for part in (
                mistake.mistake,
                mistake.matters,
                mistake.remedy,
                mistake.example,
                mistake.harmless_code,
            )
            if part.strip() not in text
        ], code
        assert ("`--fix`" in text) == mistake.fixable, code
        assert f"({level_of_code(code)})" in text, code


def test_the_list_is_that_of_the_catalog(hook: ModuleType) -> None:
    """docs/lint/codes.md has a line for each code, as the program writes it; other pages stay as they are."""
    assert hook.names() == PAGE
    assert re.findall(r"^- (AMP\d{3})", PAGE, flags=re.MULTILINE) == sorted(CODES)
    other = SimpleNamespace(file=SimpleNamespace(src_uri="lint/index.md"))
    assert hook.on_page_markdown("text", page=other) == "text"


def test_the_readme_counts_the_codes() -> None:
    counted = COUNTED.findall((ROOT / "README.md").read_text(encoding="utf-8"))

    assert counted == [str(len(CODES))]
