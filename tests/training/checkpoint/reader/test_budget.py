"""Small files that ask for much memory or time: refused within the bounds, by every reader."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import struct
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ampcompare.base.errors import AmpCompareError, CheckpointError
from ampcompare.cli import main
from ampcompare.training.checkpoint.convert.convert import convert_file
from ampcompare.training.checkpoint.inspect import inspect_file
from ampcompare.training.checkpoint.reader import budget

MILLION = 1_000_000
BOUND = 200 << 20


def text(length: int) -> bytes:
    """The instructions that put a text on the stack and in place 0 of the memo."""
    return b"X" + struct.pack("<I", length) + b"x" * length + b"q\x00"


def repeated(name: bytes, times: int, arguments: bytes = b"h\x00\x85", first: bytes | None = None) -> bytes:
    """A list of what one function makes of what is in place 0 of the memo, over and over."""
    once = b"h\x01" + arguments + b"R"
    return b"\x80\x02" + (first or text(MILLION)) + b"0c" + name + b"q\x010](" + once * times + b"e."


def tensors(times: int, shape: bytes, stride: bytes) -> bytes:
    """A model of many tensors that all look into one storage of 4 MB."""
    storage = (
        b"((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuJ\x40\x42\x0f\x00tQ"
    )
    arguments = storage + b"K\x00" + shape + stride + b"\x89ccollections\nOrderedDict\n)Rtq\x00"
    rebuild = b"0ctorch._utils\n_rebuild_tensor_v2\nq\x010}("
    items = b"".join(b"J" + struct.pack("<i", index) + b"h\x01h\x00R" for index in range(times))
    return b"\x80\x02" + arguments + rebuild + items + b"u."


def in_an_archive(pickled: bytes, stored: int = 0) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", bytes(stored))
    return file.getvalue()


def members(count: int) -> bytes:
    """An archive of little but names of empty members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}.")
        for number in range(count):
            archive.writestr(f"a/data/{number}", b"")
    return file.getvalue()


def many_entries(count: int) -> bytes:
    """A safetensors file of little but names of empty tensors."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({str(number): entry for number in range(count)}).encode()
    return struct.pack("<Q", len(header)) + header


def compressed() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\x80\x02}.")
        archive.writestr("a/data/0", bytes(250 * MILLION))
    return file.getvalue()


SIZE_1000 = b"J\x40\x42\x0f\x00\x85"
NUMPY = b"cnumpy.core.multiarray\n_reconstruct\nq\x010]("
FILLED = b"h\x01)R(K\x01J\x00\x00\x00\x01\x85cnumpy\ndtype\nX\x02\x00\x00\x00u1\x85R\x89h\x00tb"
DOUBLED = b"".join(b"q%c(h%ch%cl" % (n, n, n) for n in range(60))
BOMBS: dict[str, Callable[[], bytes]] = {
    "encoded text": lambda: repeated(b"_codecs\nencode\n", 2000, b"h\x00X\x06\x00\x00\x00latin1\x86"),
    "list of a text": lambda: repeated(b"builtins\nlist\n", 200),
    "sets of a list": lambda: repeated(b"builtins\nlist\n", 20_000, first=b"](" + b"K\x01" * 10_000 + b"eq\x00"),
    "names": lambda: b"\x80\x04" + text(MILLION) + b"0](" + b"h\x00h\x00\x93" * 2000 + b"e.",
    "empty sets": lambda: b"\x80\x04(" + b"\x8f" * 400_000 + b"l.",
    "empty dicts": lambda: b"\x80\x04(" + b"}" * 400_000 + b"l.",
    "marks": lambda: b"\x80\x04" + b"(" * 400_000 + b".",
    "memo": lambda: b"\x80\x04N" + b"\x94" * MILLION + b".",
    "tensors": lambda: in_an_archive(tensors(20_000, SIZE_1000, b"K\x01\x85"), 4 * MILLION),
    "expanded tensors": lambda: in_an_archive(tensors(20_000, SIZE_1000, b"K\x00\x85"), 4 * MILLION),
    "bytes of a number": lambda: b"\x80\x02" + NUMPY + FILLED.replace(b"h\x00tb", b"J\x00\x00\x00\x70tb") + b"e.",
    "device": lambda: b"\x80\x02]" + DOUBLED + b"q\x700ctorch\ndevice\nh\x70\x85R.",
    "key": lambda: b"\x80\x02}" + text(MILLION) + b"](" + b"]" * 100_000 + b"es.",
    "integer": lambda: b"\x80\x02}\x8b\x00\x08\x00\x00" + b"\x7f" * 2048 + b"K\x01s.",
    "members": lambda: members(50_000),
    "safetensors": lambda: many_entries(60_000),
    "compressed": compressed,
}


def peak_of(path: Path, out: Path) -> tuple[int, list[str]]:
    """Inspect and convert a file; return the most memory that Python objects took, and what was said."""
    said = []
    tracemalloc.start()
    try:
        for what in (lambda: inspect_file(path), lambda: convert_file(path, out, "native", opt_level="O2")):
            try:
                what()
            except AmpCompareError as error:
                said.append(str(error))
        return tracemalloc.get_traced_memory()[1], said
    finally:
        tracemalloc.stop()


SLOW = {"members", "safetensors", "compressed"}
OF_MANY_INSTRUCTIONS = {"memo", "empty sets", "empty dicts", "marks", "key"}
KINDS = [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW | OF_MANY_INSTRUCTIONS else []) for name in BOMBS]


@pytest.mark.parametrize("name", KINDS)
def test_a_small_file_takes_little_memory_and_time(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most ten times the file or 200 MB, a few seconds, and one line that says why it is not read.

    What takes many instructions until it is refused is measured against a quarter of all that.
    """
    part = 4 if name in OF_MANY_INSTRUCTIONS else 1
    monkeypatch.setattr(budget, "MIN_BYTES", budget.MIN_BYTES // part)
    path = tmp_path / "a.pt"
    path.write_bytes(BOMBS[name]())
    begin = time.perf_counter()
    peak, said = peak_of(path, tmp_path / "b.pt")
    assert len(said) == 2
    assert not any("\n" in line or len(line) > 400 for line in said)
    assert peak < max(BOUND // part, 10 * path.stat().st_size)
    assert time.perf_counter() - begin < 60


def test_depth_costs_calls_in_proportion(tmp_path: Path) -> None:
    """Refusing a file nested ten times deeper takes at most about ten times as many calls, not a hundred times."""

    def calls(depth: int) -> int:
        path = tmp_path / "a.pt"
        path.write_bytes(b"\x80\x02" + b"](" * depth + b"}" + b"e" * depth + b".")
        count = 0

        def count_call(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            with pytest.raises(CheckpointError, match="nested deeper than 64"):
                convert_file(path, tmp_path / "b.pt", "native")
        finally:
            sys.setprofile(None)
        return count

    calls(1000)  # what is imported at the first call is not counted
    assert calls(10_000) < 12 * calls(1000)


REDUCERS = (
    *(
        "_codecs\nencode",
        "builtins\nlist",
        "builtins\nset",
        "builtins\ndict",
        "builtins\nbytearray",
        "builtins\ncomplex",
    ),
    *("collections\nOrderedDict", "collections\ndefaultdict", "collections\nCounter", "collections\ndeque"),
    *("torch._utils\n_rebuild_tensor_v2", "torch._utils\n_rebuild_parameter", "torch._tensor\n_rebuild_from_type_v2"),
    *("torch\nSize", "torch\ndevice", "numpy\ndtype", "numpy.core.multiarray\n_reconstruct", "os\nsystem"),
    *(
        "numpy.core.multiarray\nscalar",
        "numpy._core.numeric\n_frombuffer",
        "argparse\nNamespace",
        "torch\nFloatStorage",
    ),
)


def program(chance: random.Random) -> bytes:
    """A pickle of random calls on random values, which are used again and again."""
    known = [text(chance.choice([1, 100, 100_000])), b"C\x04\x00\x00\x80?q\x00", b"(K\x01K\x02K\x03tq\x00", b"]q\x00"]
    made = b"\x80\x04" + chance.choice(known) + b"("
    stored = 1
    for _ in range(chance.randint(5, 400)):
        values = [
            b"N",
            b"K\x02",
            b"G?\xf0\x00\x00\x00\x00\x00\x00",
            b"\x88",
            b"X\x02\x00\x00\x00f4",
            b"}",
            b")",
            b"\x8f",
        ]
        values += [b"h%c" % chance.randrange(stored)] * 8
        name = f"c{chance.choice(REDUCERS)}\n".encode()
        arguments = b"(" + b"".join(chance.choices(values, k=chance.randint(0, 4))) + b"t"
        made += name + arguments + chance.choice([b"R", b"R", b"R", b"\x81"])
        made += chance.choice(
            [b"", b"", chance.choice(values) + b"b", b"(" + b"".join(chance.choices(values, k=4)) + b"tb"]
        )
        if stored < 250:
            made += b"q%c" % stored
            stored += 1
    return made + b"l."


@pytest.mark.integration
def test_random_reducers_stay_in_their_bounds(tmp_path: Path) -> None:
    """Calls that plain data and tensors are built by, on whatever values: read or refused, within 200 MB, none run."""
    path = tmp_path / "a.pt"
    peaks, refused = [], 0
    for number in range(300):
        path.write_bytes(program(random.Random(number)))
        peak, said = peak_of(path, tmp_path / "b.pt")
        peaks.append(peak)
        refused += len(said) == 2
        assert not any("\n" in line for line in said)
    assert max(peaks) < BOUND
    assert refused > 100


@pytest.mark.slow
def test_plain_pickles_of_many_numbers_are_still_read(tmp_path: Path) -> None:
    """The budget lets through what programs write: a hundred thousand numbers, and names to short lists."""
    path = tmp_path / "a.pt"
    held = {"model": {f"layer{index}.weight": torch.zeros(2) for index in range(3000)}}
    logs = {
        "loss": [index / 7 for index in range(100_000)],
        "log": [{"step": step, "loss": 0.5} for step in range(20_000)],
    }
    torch.save({**held, **logs}, path)
    assert inspect_file(path).rows[0]["entries"] == 3000
    path.write_bytes(pickle.dumps(logs))
    assert inspect_file(path).keys == ["loss", "log"]


@pytest.mark.parametrize("arguments", [["--inspect"], ["--to", "native", "out.pt"]])
def test_a_fifo_is_no_checkpoint(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO is refused at once, where opening it would wait for a writer."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert main(["convert", "pipe", *arguments]) == 2
    assert "pipe is a FIFO" in capsys.readouterr().err
