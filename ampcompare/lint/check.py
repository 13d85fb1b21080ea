"""Find the mistakes of one document: a quick look at its text first, then its tree."""

from __future__ import annotations

import re
from collections.abc import Callable

from ampcompare.lint.finding import Finding
from ampcompare.lint.module import RULES, LintModule
from ampcompare.lint.rules import (
    apex_initialize,
    apex_scale_loss,
    autocast,
    checkpoints,
    gradients,
    lightning,
    masks,
    removed,
    scaler_steps,
    setup,
    style,
    update_order,
)
from ampcompare.lint.silence import silenced_lines
from ampcompare.source.syntax import SourceInvalid, parse_tree

__all__ = ["RULE_FILES", "UNREADABLE", "check_text", "is_of_interest"]

UNREADABLE = "AMP000"
RULE_FILES = (
    apex_initialize,
    apex_scale_loss,
    autocast,
    checkpoints,
    gradients,
    lightning,
    masks,
    removed,
    scaler_steps,
    setup,
    style,
    update_order,
)
WORDS = re.compile(
    r"\bapex\b|autocast|[Ss]caler\b|\bamp\b|_amp_|clip_grad_norm\(|type\s*=\s*bool|amp_(?:backend|level)\b"
    r"""|precision\s*=\s*["']?16|masked_fill_?\([^\n]*-\s?(?:\d[\d.]*e\d|\d{6})"""
)


def is_of_interest(text: str) -> bool:
    """Return whether a text has a word without which no rule reports anything."""
    return WORDS.search(text) is not None


def check_text(text: str, selected: Callable[[str], bool] = lambda code: True) -> list[Finding]:
    """Return the findings of a module, by line, those that comments silence left out.

    Args:
        selected: which codes are wanted; rules of which none is are not run.

    Raises:
        SourceInvalid: the text is not Python 3, and it has words of interest.
    """
    if not is_of_interest(text):
        return []
    module = LintModule(text, parse_tree(text))
    found: dict[tuple[str, int, int], Finding] = {}
    for codes, rule in RULES:
        if any(map(selected, codes)):
            try:
                for finding in rule(module):
                    if selected(finding.code):
                        found.setdefault((finding.code, finding.line, finding.column), finding)
            except RecursionError:
                raise SourceInvalid("nested too deeply") from None
    silenced = silenced_lines(text)
    findings = sorted(found.values(), key=lambda finding: (finding.line, finding.column, finding.code))
    return [finding for finding in findings if not silenced(finding)]
