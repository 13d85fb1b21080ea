"""The page of the codes of `lint`, from the catalog: `python docs/hooks/lint_codes.py` writes docs/lint/codes.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ampcompare.source.lint.catalog import CODES, GROUPS
from ampcompare.source.lint.module import Mistake
from ampcompare.source.lint.report import level_of

PAGE = Path(__file__).resolve().parent.parent / "lint" / "codes.md"


def page() -> str:
    """Return the whole page."""
    parts = ["# Codes of lint", "", "How to run it, silence it and configure it: [Lint](index.md).", ""]
    for prefix, title in GROUPS.items():
        parts += [f"## {prefix}xx: {title}", ""]
        for code, mistake in sorted(CODES.items()):
            if code.startswith(prefix):
                parts += _section(mistake)
    return "\n".join(parts)


def _section(mistake: Mistake) -> Iterator[str]:
    notes = [f"({level_of(mistake.code)})"]
    if mistake.fixable:
        notes.append("`--fix` corrects it where the correction is sure.")
    if not mistake.by_default:
        notes.append("Reported only where `--select` names it.")
    if mistake.guard or mistake.name in _guards():
        notes.append(f"At run time: the guard [`{mistake.guard or mistake.name}`](../guards.md).")
    yield from (f"### {mistake.code}: {mistake.name}", "")
    yield from (f"**What**: {mistake.mistake}. {' '.join(notes)}", "")
    yield from (f"**Why it matters**: {mistake.matters}.", "")
    yield from (f"**Remedy**: {mistake.remedy}.", "")
    yield from ("```python", mistake.example.strip(), "```", "")
    yield from ("Not reported:", "", "```python", mistake.harmless.strip(), "```", "")


def _guards() -> set[str]:
    from ampcompare.guards import GUARDS

    return set(GUARDS)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
