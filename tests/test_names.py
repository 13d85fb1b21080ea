"""Names keep what "How names are built" of docs/design.md says of them, as far as annotations tell."""

import ast
import re
from collections.abc import Iterator, Mapping

import pytest

from tests.modules import modules_of_package, parsed

SEVERAL = r"(?i:list|tuple|set|frozenset|dict|sequence|iterable|iterator|collection|mapping|counter)\b.*"
ONE_TEXT = r"str( \| None)?|None"
# By the first word of a name: the annotation of what it returns, as a pattern.
BY_FIRST_WORD = {
    **dict.fromkeys(
        ("is", "has", "have", "are", "can", "may", "does"), r"bool( \| None)?|TypeGuard\[.*|Answer"
    ),
    "why": ONE_TEXT,
    **dict.fromkeys(("at", "before", "after"), r"None|Any"),
    "find": r"(?!bool).+",
    "num": "int|Tensor",
}
# By the last word of a name that begins with no verb, and in which no preposition stands before that word.
BY_LAST_WORD = {
    **dict.fromkeys(("text", "sentence", "phrase", "line"), ONE_TEXT),
    "reason": rf"{ONE_TEXT}|FaultReason \| None",
    **dict.fromkeys(("lines", "sentences"), SEVERAL),
    "verdict": r"Verdict( \| None)?",
    "effect": r"Effect( \| None)?",
    "evidence": "Evidence",
    "cell": r"(str \| |Map)?Cell",
    "document": "Document",
    "seconds": r"(float|int)( \| None)?",
}
VERBS = {
    *("adapt", "append", "are", "begin", "build", "check", "comment", "count", "draw"),
    *("end", "find", "fix", "format", "has", "hide", "invalidate", "is", "keep"),
    *("launch", "lint", "log", "may", "migrate", "note", "parse", "pool", "print"),
    *("put", "read", "refuse", "report", "run", "say", "show", "split", "start"),
    *("train", "try", "write"),
}
PREPOSITIONS = {"and", "as", "by", "for", "in", "of", "on", "or", "to", "with", "without"}
# Names whose last word means another thing there: a line is a number in a source text.
OTHERWISE = {
    "first_line",
    "_block_start_line",
    "_parse_line",
    "begins_line",
    "ends_line",
    "_hours_minutes_seconds",
}


def _functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield each function of the package with its module, but for those whose names Apex has given."""
    for module, path in modules_of_package().items():
        if not module.startswith("ampcompare.apex"):
            for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef) and node.returns is not None:
                    yield module, node


def _misnamed(patterns: Mapping[str, str], *, last: bool) -> list[str]:
    """Return the functions whose annotation does not fit the first word of their name, or the last one."""
    wrong = []
    for module, node in _functions():
        words = node.name.strip("_").split("_")
        if last and (VERBS & {words[0]} or PREPOSITIONS & set(words[:-1]) or node.name in OTHERWISE):
            continue
        pattern = patterns.get(words[-1 if last else 0]) if len(words) > last else None
        returned = ast.unparse(node.returns).strip("'\"") if node.returns is not None else ""
        if pattern is not None and not re.fullmatch(
            rf"{pattern}|bool( \| None)?" if last else pattern, returned
        ):
            wrong.append(f"{module}: {node.name} -> {returned}")
    return wrong


@pytest.mark.parametrize("last", [False, True])
def test_names_say_what_is_returned(last: bool) -> None:
    """Questions answer yes or no, reasons and sentences are text, and a noun returns the thing that it names."""
    patterns = BY_LAST_WORD if last else BY_FIRST_WORD
    assert _misnamed(patterns, last=last) == []
