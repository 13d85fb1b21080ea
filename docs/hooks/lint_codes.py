"""The page of the codes of `lint`, from the catalog.

mkdocs calls `on_page_markdown`: on the site each code has a section with its texts and examples. In the repository the
page is a list of names, which `PYTHONPATH=. python docs/hooks/lint_codes.py` writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ampcompare.source.lint.catalog import CODES, GROUPS
from ampcompare.source.lint.read.module import Mistake
from ampcompare.source.lint.report import level_of_code

PAGE = Path(__file__).resolve().parent.parent / "lint" / "codes.md"
HEAD = "# Codes of lint\n\nHow to run it, silence it and configure it: [Lint](index.md)."
LIST_HEAD = f"""{HEAD} A finding says what is wrong and the remedy.
On the site (`scripts/docs`) each code has a section: what the mistake does to the training, the remedy, and a wrong
and a right example.

`*`: `--fix` corrects it where the correction is sure."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the sections in place of the list."""
    return sections() if page.file.src_uri == "lint/codes.md" else markdown


def names() -> str:
    """Return the page of the repository: the name of each code."""
    parts = [LIST_HEAD, ""]
    for prefix, title in GROUPS.items():
        parts += [f"## {prefix}xx: {title}", ""]
        for code, mistake in sorted(CODES.items()):
            if code.startswith(prefix):
                parts.append(f"- {code} {mistake.name}{' `*`' * mistake.fixable}")
        parts.append("")
    return "\n".join(parts)


def sections() -> str:
    """Return the page of the site: a section for each code."""
    parts = [HEAD, ""]
    for prefix, title in GROUPS.items():
        parts += [f"## {prefix}xx: {title}", ""]
        for code, mistake in sorted(CODES.items()):
            if code.startswith(prefix):
                parts += _section(mistake)
    return "\n".join(parts)


def _section(mistake: Mistake) -> Iterator[str]:
    notes = [f"({level_of_code(mistake.code)})"]
    if mistake.fixable:
        notes.append("`--fix` corrects it where the correction is sure.")
    if mistake.guard or mistake.name in _guards():
        notes.append(f"At run time: the guard [`{mistake.guard or mistake.name}`](../guards.md).")
    yield from (f"### {mistake.code}: {mistake.name}", "")
    yield from (f"**What**: {mistake.mistake}. {' '.join(notes)}", "")
    yield from (f"**Why it matters**: {mistake.matters}.", "")
    yield from (f"**Remedy**: {mistake.remedy}.", "")
    yield from ("```python", mistake.example.strip(), "```", "")
    yield from ("Not reported:", "", "```python", mistake.harmless_code.strip(), "```", "")


def _guards() -> set[str]:
    from ampcompare.guards import GUARDS

    return set(GUARDS)


if __name__ == "__main__":
    PAGE.write_text(names(), encoding="utf-8")
