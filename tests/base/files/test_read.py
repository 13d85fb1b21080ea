"""Reading files of users: bounded in kind, size, depth and number of values."""

import os
from pathlib import Path
from typing import Any

import pytest

from ampcompare.base.errors import ConfigError
from ampcompare.base.files.read import FileFault, check_json_compatible, parse_json, parse_yaml, read_text
from ampcompare.settings.config import RunConfig
from ampcompare.settings.validation import build_validated_model

needs_fifo = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


@needs_fifo
def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileFault, match="it is a pipe or a device"):
        read_text(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/dev/zero", "a device, not a regular file"),
        ("/", "Is a directory"),
        ("/none", "No such file"),
        ("a\0b", "null"),
    ],
)
def test_what_is_no_regular_file(path: str, text: str) -> None:
    """Devices, folders, missing files and impossible names are named as what they are."""
    with pytest.raises(FileFault, match=text):
        read_text(Path(path))


def test_size_and_encoding(tmp_path: Path) -> None:
    """A file above the limit is not read, and one that is not UTF-8 is refused with the place."""
    (tmp_path / "a").write_text("x" * 11)
    assert read_text(tmp_path / "a", max_bytes=11) == "x" * 11
    with pytest.raises(FileFault, match="it has more than the 10 bytes that are read"):
        read_text(tmp_path / "a", max_bytes=10)
    (tmp_path / "b").write_bytes(b"ab\xff")
    with pytest.raises(FileFault, match="not text in UTF-8 \\(byte 2\\)"):
        read_text(tmp_path / "b")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[" * 200_000, "nested deeper than 64"),
        ("9" * 5000, "more than 64 bits"),
        ("[-" + "9" * 30 + "]", "more than 64 bits"),
        ("", "not JSON"),
        ("{,}", "not JSON"),
    ],
)
def test_json_that_is_refused(text: str, fault: str) -> None:
    """Depth, huge numbers and what is not JSON end in one fault."""
    with pytest.raises(FileFault, match=fault):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("x: !!int abc", "it is not YAML: a value cannot be read"),
        ("x: !!timestamp 2001-01-01", "a value is of type date; JSON has no such values"),
        ("x: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("x: 0x" + "f" * 300, "more than 64 bits"),
        ("x: &a [*a]", "nested deeper"),
        ("- " * 3000, "nested deeper"),
        ("x, " * 90_000, "at most 262,144 are read"),
        ("[" + "x, " * 30_000 + "]", "more than 5,000 values"),
        ("*none", "undefined alias"),
    ],
)
def test_yaml_that_is_refused(text: str, fault: str) -> None:
    """Tags, numbers and cycles that JSON could not hold end in one fault."""
    with pytest.raises(FileFault, match=fault):
        parse_yaml(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("{a: 1, b: [x, 2.5, true, null]}", {"a": 1, "b": ["x", 2.5, True, None]}),
        ("x: 2001-01-01", {"x": "2001-01-01"}),
        ("x: 2001-99-99", {"x": "2001-99-99"}),
        ("base: &b {a: 1}\nmore: {<<: *b, c: 2}", {"base": {"a": 1}, "more": {"a": 1, "c": 2}}),
    ],
)
def test_yaml_that_is_read(text: str, value: Any) -> None:
    """Plain values, aliases and merged mappings are read as ever; a date is a text."""
    assert parse_yaml(text) == value


def _cycle() -> list[Any]:
    inside: list[Any] = []
    inside.append(inside)
    return inside


def _wide() -> list[Any]:
    node: list[Any] = [1]
    for _ in range(12):
        node = [node] * 10
    return node


@pytest.mark.parametrize(
    ("value", "fault"),
    [(_cycle(), "nested deeper"), (_wide(), "more than 5,000"), ({1, 2}, "type set"), ({1: 2}, "the key 1 is not text"),
     (b"x", "type bytes"), (2**70, "64 bits")],
)  # fmt: skip
def test_arguments_of_a_model(value: Any, fault: str) -> None:
    """What a record could not hold is refused as an argument of a network, also from Python."""
    with pytest.raises(FileFault, match=fault):
        check_json_compatible({"x": value})
    with pytest.raises(ConfigError, match=f"recipe.model.args: .*{fault}"):
        build_validated_model(RunConfig, {"recipe": {"model": {"args": {"x": value}}}})
