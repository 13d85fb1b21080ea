"""House words: what CONTRIBUTING.md replaces does not come back into docstrings, comments, messages and pages."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
SOURCES = [path for room in ("ampcompare", "benchmarks") for path in sorted((ROOT / room).rglob("*.py"))]
SCRIPTS = [
    path
    for folder in ("scripts", ".ci", "docker")
    for path in sorted((ROOT / folder).iterdir())
    if path.is_file()
]
TABLE = re.compile(r"^\| (.+?) \| (.+?) \|$", flags=re.MULTILINE)
# what stands between the words of a text that is cut into strings or comments
BETWEEN = str.maketrans("\"'#", "   ")


def house_words() -> dict[str, str]:
    """Return the phrases to avoid with what to write: the table of CONTRIBUTING.md."""
    text = (
        (ROOT / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .partition("## House words")[2]
        .partition("\n## ")[0]
    )
    rows = TABLE.findall(text)[1:]  # the head of the table holds no words
    return {phrase.strip('"'): plain for cell, plain in rows for phrase in cell.split(", ")}


WORDS = house_words()
# A phrase that begins with a capital letter is the start of a sentence; others are found in either case.
PATTERNS = {
    phrase: re.compile(
        rf"(?<![\w-]){re.escape(phrase)}(?![\w-])", 0 if phrase[0].isupper() else re.IGNORECASE
    )
    for phrase in WORDS
}


def findings(text: str) -> list[str]:
    """Return each phrase to avoid in a text, with what to write."""
    flat = " ".join(text.split())
    lower = flat.lower()
    near = (phrase for phrase in WORDS if phrase.lower() in lower)  # the quick way, for most texts
    return [f'"{phrase}": write {WORDS[phrase]}' for phrase in near if PATTERNS[phrase].search(flat)]


def prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each block of comments and each string of a module, parts of f-strings too."""
    block, begin, last = "", 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] > last + 1:
                yield begin, block
                block, begin = "", token.start[0]
            block, last = f"{block} {token.string.lstrip('#')}", token.start[0]
    yield begin, block
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def findings_of(source: str) -> list[str]:
    """Return what is found in comments and strings of a module, with the line where each begins."""
    if not findings(re.sub(r"(?<!\w)[BFRbfr]{1,2}(?=[\"'])", "", source).translate(BETWEEN)):
        return []
    return [f"line {line}: {finding}" for line, text in prose_of(source) for finding in findings(text)]


def without_code(markdown: str) -> str:
    """Return the prose of a page: no blocks of code, no code within a line."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```$", "", markdown, flags=re.DOTALL | re.MULTILINE))


def test_the_table_is_read() -> None:
    """The table has the words that came back most often, and each is found in a sentence."""
    assert {"Tell whether", "See that", "goes on from", "afresh", "whoever", "for good"} <= set(WORDS)
    for phrase in WORDS:
        assert findings(f"{phrase} x."), phrase
    assert not findings("Return whether the run resumes from a checkpoint.")


def found_in(paths: Iterable[Path], search: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """Return what a search finds, by file."""
    by_file = {path.relative_to(ROOT).as_posix(): search(path.read_text(encoding="utf-8")) for path in paths}
    return {name: found for name, found in by_file.items() if found}


def test_pages() -> None:
    """No page uses one of the phrases in its prose."""
    assert len(PAGES) > 50
    assert not found_in(PAGES, lambda text: findings(without_code(text)))


def test_scripts() -> None:
    """No script uses one of the phrases in comments and messages."""
    assert len(SCRIPTS) > 10
    assert not found_in(SCRIPTS, findings)


def test_package() -> None:
    """No module uses one of the phrases in comments, docstrings, help and messages."""
    assert len(SOURCES) > 100
    assert not found_in(SOURCES, findings_of)


PARTICIPLE = re.compile(
    r"_*([a-z]+ed|[a-z]+en|shown|known|grown|drawn|kept|held|told|said|found|made|built|met|left|put|set|cut|sent|laid"
    r"|lent|read|bound|lost|gone|done|again|anew|apart|once|only|first|identical)_*"
)
VERBS = {"cut", "feed", "flatten", "listen", "open", "put", "read", "set", "unflatten", "widen"}
OTHERS = {"__len__", "children", "seed", "when"}
# Public ones: of a loss scaler of Apex, of a step, and of a rewritten file.
PUBLIC = {"_unskipped", "applied", "changed"}


def participles(source: str) -> list[str]:
    """Return the functions of a module whose name is a participle or adverb alone."""
    names = re.findall(r"^ *(?:async )?def (\w+)\(", source, flags=re.MULTILINE)
    return [
        name
        for name in names
        if PARTICIPLE.fullmatch(name) and not {name.strip("_"), name} & (VERBS | OTHERS | PUBLIC)
    ]


def test_functions_are_called_by_what_they_do() -> None:
    """By a verb with its object, or by a noun for what they return: `_shown` and `given` cannot be searched for."""
    assert not found_in(SOURCES, participles)
