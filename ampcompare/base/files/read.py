"""Reading what users wrote: regular files of bounded size, JSON, and YAML of bounded depth and number of values.

Every fault is a `FileFault`, whose text says in one line what is wrong; callers add the name of the file.
"""

import functools
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 2**26  # of a file of JSON; a report of 1,000 cells has a sixth of it
MAX_YAML_CHARACTERS = 2**18
MAX_YAML_VALUES = 5_000  # with those that an alias repeats
MAX_DEPTH = 64
NESTED = (list, tuple, Mapping)


class FileFault(ValueError):
    """What is wrong with a file or a text, in one line."""


def open_regular_file(path: Path) -> int:
    """Return the descriptor of a regular file that is opened for reading, without waiting at a pipe.

    Raises:
        FileFault: it cannot be opened, or is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (OSError, ValueError) as error:  # a null byte in the name
        raise FileFault(getattr(error, "strerror", None) or str(error)) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise FileFault(
            "Is a directory" if stat.S_ISDIR(mode) else "it is a pipe or a device, not a regular file"
        )
    return descriptor


def read_text(path: Path, *, max_bytes: int = MAX_BYTES, encoding: str = "utf-8") -> str:
    """Return the text of a regular file.

    Args:
        path: of the file; a device, a pipe or a folder is refused.
        max_bytes: how many bytes it may have.
        encoding: such as "utf-8-sig", which skips a byte order mark.

    Raises:
        FileFault: it cannot be opened, is larger, or is not text in that encoding.
    """
    try:
        with os.fdopen(open_regular_file(path), "rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise FileFault(error.strerror or str(error)) from None
    if len(content) > max_bytes:
        raise FileFault(f"it has more than the {max_bytes:,} bytes that are read")
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise FileFault(f"it is not text in UTF-8 (byte {error.start})") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """Return the content of JSON; whole numbers have at most 64 bits.

    Raises:
        FileFault: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text, parse_int=_parse_whole_number)
    except FileFault:
        raise
    except RecursionError:
        raise _fault_of_depth() from None
    except ValueError as error:
        raise FileFault(f"not JSON ({error})") from None


def check_json_compatible(value: Any) -> None:
    """Check that a value is made of mappings with text keys, lists, texts, numbers, true, false and null alone.

    Raises:
        FileFault: it holds what JSON has no word for, or is nested too deeply.
    """
    for one in _values_inside_data(value):
        if isinstance(one, Mapping):
            odd = next((key for key in one if not isinstance(key, str)), None)
            if odd is not None:
                raise FileFault(f"the key {odd!r} is not text; write it in quotes")


def _values_inside_data(data: Any) -> list[Any]:
    """Return a value and all that it holds; what an alias of YAML stands for counts each time."""
    found, level = [data], [data]
    for _ in range(MAX_DEPTH):
        nodes = [
            node.values() if isinstance(node, Mapping) else node for node in level if isinstance(node, NESTED)
        ]
        level = []
        for node in nodes:
            level += node
            if len(found) + len(level) > MAX_YAML_VALUES:
                raise FileFault(f"it holds more than {MAX_YAML_VALUES:,} values")
        found += level
        if not level:
            break
    else:
        raise _fault_of_depth()
    for one in found:
        if isinstance(one, int) and not isinstance(one, bool) and abs(one) >= 2**63:
            raise FileFault("a whole number has more than 64 bits")
        if not isinstance(one, (*NESTED, str, int, float, type(None))):
            raise FileFault(f"a value is of type {type(one).__name__}; JSON has no such values")
    return found


def _fault_of_depth() -> FileFault:
    return FileFault(f"it is nested deeper than {MAX_DEPTH} levels")


def _parse_whole_number(text: str) -> int:
    if len(text) > 20 or abs(int(text)) >= 2**63:
        raise FileFault(f"the whole number {text[:12]}... has more than 64 bits")
    return int(text)


def parse_yaml(text: str) -> Any:
    """Return the content of YAML: what JSON has too, so that a date is a text.

    Raises:
        FileFault: it is too long, not YAML, or nested too deeply.
    """
    import yaml

    if len(text) > MAX_YAML_CHARACTERS:
        raise FileFault(f"it has {len(text):,} characters, and at most {MAX_YAML_CHARACTERS:,} are read")
    try:
        data = yaml.load(text, _yaml_loader_class())
    except yaml.YAMLError as error:
        raise FileFault(f"it is not YAML: {_yaml_fault_text(error)}") from None
    except RecursionError:
        raise _fault_of_depth() from None
    except (ValueError, ArithmeticError, KeyError, AttributeError, TypeError) as error:  # as of `!!int abc`
        raise FileFault(f"it is not YAML: a value cannot be read ({error})") from None
    _values_inside_data(data)
    return data


@functools.cache
def _yaml_loader_class() -> Any:
    """Return a safe loader that knows no dates; the YAML package is imported when the first text is read."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Takes a date as a text."""

    Loader.yaml_implicit_resolvers = {
        first: [(tag, form) for tag, form in forms if not tag.endswith(":timestamp")]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader


def _yaml_fault_text(error: Any) -> str:
    """Return what a YAML parser found wrong, with the place in the file, in one line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None or error.problem is None:
        return " ".join(str(error).split())
    begun = getattr(error, "context_mark", None)
    context = f", {error.context}" if error.context else ""
    if context and begun is not None and begun.line != mark.line:
        context += f" that begins in line {begun.line + 1}"
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}{context}"
