"""Reading what users wrote: regular files of bounded size, and JSON and YAML of bounded depth and number of values.

Every fault is a `FileFault`, whose text says in one line what is wrong; callers add the name of the file. Memory stays
below ten times the size of a file, or 200 MB, whatever the file holds.
"""

from __future__ import annotations

import functools
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

__all__ = ["FileFault", "check_plain", "open_regular", "parse_json", "parse_yaml", "read_json", "read_text"]

MAX_BYTES = 2**26  # of a file of JSON; a report of 1,000 cells has a sixth of it
MAX_YAML_CHARACTERS = 2**18
MAX_YAML_VALUES = 5_000  # with those that an alias repeats
MAX_DEPTH = 64
MAX_DIGITS = 400
FREE_MEMORY = 10**8
MEMORY_FACTOR = 8
COSTS = {"{": 200, "[": 90, ",": 60}  # upper bounds of the memory of a value, in bytes, by the sign before it
KINDS = {
    stat.S_ISDIR: "Is a directory",
    stat.S_ISFIFO: "it is a pipe, not a regular file",
    stat.S_ISSOCK: "it is a socket, not a regular file",
    stat.S_ISCHR: "it is a device, not a regular file",
    stat.S_ISBLK: "it is a device, not a regular file",
}
YAML_TAGS = ("null", "bool", "int", "float", "str", "seq", "map", "merge")
YAML_PREFIX = "tag:yaml.org,2002:"


class FileFault(ValueError):
    """What is wrong with a file or a text, in one line."""


def open_regular(path: Path) -> int:
    """Open a regular file for reading, without waiting for the other end of a pipe.

    Returns:
        A file descriptor, which the caller closes.

    Raises:
        FileFault: it is not there, cannot be opened, or is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise FileFault(error.strerror or str(error)) from None
    except ValueError as error:  # a null byte in the name
        raise FileFault(str(error)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise FileFault(next((text for of_kind, text in KINDS.items() if of_kind(mode)), "it is not a regular file"))
    return descriptor


def read_text(path: Path, *, most: int = MAX_BYTES, encoding: str = "utf-8") -> str:
    """Return the text of a regular file of at most `most` bytes.

    Raises:
        FileFault: as for `open_regular`, or it is too large, or not UTF-8.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise FileFault(f"it has {size:,} bytes, and at most {most:,} are read")
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise FileFault(error.strerror or str(error)) from None
    if len(content) > most:  # files of /proc have no size
        raise FileFault(f"it has more than the {most:,} bytes that are read")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise FileFault(f"it is not text in UTF-8 (byte {error.start})") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        FileFault: as for `read_text` and `parse_json`.
    """
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """Return the content of JSON; whole numbers have at most 64 bits.

    Raises:
        FileFault: not JSON, nested too deeply, or more values than memory should be spent on.
    """
    memory = sum(cost * text.count(sign) for sign, cost in COSTS.items())
    if memory > max(FREE_MEMORY, MEMORY_FACTOR * len(text)):
        raise FileFault(f"its {len(text):,} characters hold more values than are read")
    try:
        data = json.loads(text, parse_int=_whole_number)
    except FileFault:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise FileFault(f"not JSON ({error})") from None
    _values(data, len(text) + 1)
    return data


def check_plain(value: Any) -> None:
    """Check that a value is made of mappings with text keys, lists, texts, numbers, true, false and null alone.

    Raises:
        FileFault: it is not, is nested too deeply or within itself, or holds too many values.
    """
    for one in _values(value, MAX_YAML_VALUES):
        if isinstance(one, Mapping):
            odd = next((key for key in one if not isinstance(key, str)), None)
            if odd is not None:
                raise FileFault(f"the key {odd!r} is not text; write it in quotes")
        elif isinstance(one, int) and not isinstance(one, bool) and abs(one) >= 2**63:
            raise FileFault("a whole number has more than 64 bits")
        elif not isinstance(one, (list, tuple, str, int, float, type(None))):
            raise FileFault(f"a value is of type {type(one).__name__}; JSON has no such values")


def _values(data: Any, most: int) -> list[Any]:
    """Return a value and all that it holds.

    Raises:
        FileFault: nested too deeply, or more than `most` values.
    """
    found, level = [data], [data]
    for _ in range(MAX_DEPTH):
        nodes = [node.values() if isinstance(node, Mapping) else node for node in level]
        level = []
        for node in nodes:
            level += node if isinstance(node, (list, tuple)) else list(node)
            if len(found) + len(level) > most:
                raise FileFault(f"it holds more than {most:,} values")
        found += level
        level = [node for node in level if isinstance(node, (list, tuple, Mapping))]
        if not level:
            return found
    raise _too_deep()


def _too_deep() -> FileFault:
    return FileFault(f"it is nested deeper than {MAX_DEPTH} levels")


def _whole_number(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= 2**63:
        raise FileFault(f"the whole number {text[:12]}... has more than 64 bits")
    return int(text)


def parse_yaml(text: str) -> Any:
    """Return the content of YAML: what JSON has too, so that a date is a text.

    Raises:
        FileFault: not YAML, a value that JSON does not have, nested too deeply, or too many values.
    """
    import yaml

    if len(text) > MAX_YAML_CHARACTERS:
        raise FileFault(f"it has {len(text):,} characters, and at most {MAX_YAML_CHARACTERS:,} are read")
    try:
        loader = _yaml_loader()(text)
        try:
            node = loader.get_single_node()
            return None if node is None else loader.construct_document(_check_nodes(node))
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise FileFault(f"it is not YAML: {_fault(error)}") from None
    except RecursionError:
        raise _too_deep() from None


@functools.cache
def _yaml_loader() -> Any:
    """Return the class of the loader; the YAML package is imported when the first text is read."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads plain values, and says in which line one cannot be read."""

        composed = 0

        def fetch_flow_collection_start(self, token: Any) -> None:
            if self.flow_level >= MAX_DEPTH:  # the scanner looks far ahead, in time that grows with depth
                raise _too_deep()
            super().fetch_flow_collection_start(token)

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.composed += 1
            if self.composed > MAX_YAML_VALUES:
                raise FileFault(f"it holds more than {MAX_YAML_VALUES:,} values")
            return super().compose_node(parent, index)

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                value = super().construct_object(node, deep)
                if isinstance(value, int) and abs(value) >= 2**63:
                    raise ValueError("it has more than 64 bits")
                return value
            except (ValueError, ArithmeticError, KeyError, AttributeError, TypeError) as error:
                why = str(error) if isinstance(error, (ValueError, ArithmeticError)) else "no such value"
                shown = str(node.value)[:40]
                kind = node.tag.removeprefix(YAML_PREFIX)
                raise yaml.constructor.ConstructorError(
                    None, None, f"{shown!r} cannot be read as {kind}: {why}", node.start_mark
                ) from None

    Loader.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in forms if tag != f"{YAML_PREFIX}timestamp"]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader


def _check_nodes(root: yaml.Node) -> yaml.Node:
    """Return a tree of nodes after following its aliases as often as they are used, without building what they hold.

    Raises:
        FileFault: more values than `MAX_YAML_VALUES`, or a depth beyond `MAX_DEPTH`, as of a node within itself.
        YAMLError: a value that JSON does not have.
    """
    import yaml

    seen: dict[int, tuple[int, int]] = {}

    def measure(node: Any, depth: int) -> tuple[int, int]:
        """Return how many values a node stands for, and how many levels."""
        if depth > MAX_DEPTH:
            raise _too_deep()
        tag = node.tag.removeprefix(YAML_PREFIX)
        if tag not in YAML_TAGS:
            raise yaml.constructor.ConstructorError(None, None, f"a value of type {tag} is not used", node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            if tag in ("int", "float") and len(node.value) > MAX_DIGITS:
                what = f"a number of {len(node.value):,} digits"
                raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
            return 1, 1
        if id(node) not in seen:
            parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
            measured = [measure(part, depth + 1) for part in parts]
            seen[id(node)] = 1 + sum(count for count, _ in measured), 1 + max((high for _, high in measured), default=0)
        if seen[id(node)][0] > MAX_YAML_VALUES:
            raise FileFault(f"it holds more than {MAX_YAML_VALUES:,} values, with those that its aliases repeat")
        if seen[id(node)][1] > MAX_DEPTH:
            raise _too_deep()
        return seen[id(node)]

    measure(root, 1)
    return root


def _fault(error: Any) -> str:
    """Return what a YAML parser found wrong, with the place in the file, in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None or error.problem is None:
        return " ".join(str(error).split())
    begun = getattr(error, "context_mark", None)
    context = f", {error.context}" if error.context else ""
    since = (
        f" that begins in line {begun.line + 1}" if context and begun is not None and begun.line != mark.line else ""
    )
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}{since}"
