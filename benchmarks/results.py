"""The files that a benchmark leaves: a page for readers, and its figures for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["write_results"]


def write_results(
    out: str, title: str, about: str | None, facts: str, text: str, data: Mapping[str, Any] | None = None
) -> None:
    """Write OUT.md, and OUT.json where there is data.

    Args:
        about: the docstring of the benchmark, which says what was done.
        facts: one line on machine and versions.
        text: tables and sentences, in Markdown.
    """
    page = f"# {title}\n\n```\n{about}```\n\n{facts}\n\n{text.rstrip()}\n"
    Path(out + ".md").write_text(page, encoding="utf-8")
    if data is not None:
        Path(out + ".json").write_text(json.dumps({"environment": facts, **data}) + "\n", encoding="utf-8")
