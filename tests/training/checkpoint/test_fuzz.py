"""Files that were damaged or made by an enemy: always one line, never a traceback, never code that runs."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save

from ampcompare.apex.fp16_utils import FP16_Optimizer
from ampcompare.base.errors import AmpCompareError, CheckpointError
from ampcompare.cli import main
from ampcompare.training.checkpoint.convert.convert import convert_file
from ampcompare.training.checkpoint.inspect import inspect_file, inspection_lines
from ampcompare.training.checkpoint.store.file import read_checkpoint, write_checkpoint
from ampcompare.training.checkpoint.store.frame import COMMENT, COMMENT_SIZE

pytestmark = pytest.mark.integration

EACH = 100  # times seven tests
SOURCES = ("ours", "archive", "before 1.6", "safetensors", "pickle", "FP16_Optimizer")


def legacy(value: float) -> dict[str, Any]:
    """A checkpoint of a script with Apex and of timm at once, small, with every kind of entry."""
    weight = torch.full((4, 3), value)
    return {
        "arch": "net",
        "state_dict": {"module.weight": weight, "module.half": weight.half(), "module.count": torch.tensor(3)},
        "optimizer": {
            "state": {0: {"exp_avg": weight.clone(), "exp_avg_sq": weight.half(), "step": 3}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}],
        },
        "amp": {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 7}},
        "epoch": 2,
        "names": {"a", "b"},
        "version": 2,
    }


def of_fp16_optimizer() -> dict[str, Any]:
    model = torch.nn.Linear(2, 2).half()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True, verbose=False)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("sources") / "a.pt"
    found = {}
    state = legacy(1 / 3)
    for name, as_archive in (("archive", True), ("before 1.6", False)):
        torch.save(state, path, _use_new_zipfile_serialization=as_archive)
        found[name] = path.read_bytes()
    torch.save(of_fp16_optimizer(), path, _use_new_zipfile_serialization=False)
    found["FP16_Optimizer"] = path.read_bytes()
    ours = {"model": state["state_dict"], "optimizer": state["optimizer"], "amp": state["amp"], "arm": "apex:O2"}
    write_checkpoint(path, ours)
    found["ours"] = path.read_bytes()
    found["safetensors"] = save({"weight": state["state_dict"]["module.weight"]})
    found["pickle"] = pickle.dumps({"model": [1, "two", (3.0, None)], "args": {"lr": 0.1}}, protocol=4)
    return found


def flip(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 20)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def cut(data: bytearray, chance: random.Random) -> None:
    """Take away the end, or a piece."""
    at = chance.randrange(max(1, len(data)))
    del data[at : chance.choice([len(data), at + chance.randint(1, 200)])]


def splice(data: bytearray, chance: random.Random) -> None:
    """Put a piece of the file over or into another place."""
    size = chance.randint(1, 300)
    source = chance.randrange(len(data))
    target = chance.randrange(len(data))
    data[target : target + chance.choice([0, size])] = data[source : source + size]


def swell(data: bytearray, chance: random.Random) -> None:
    """Write huge numbers where sizes may be."""
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(max(1, len(data) - 8))
        data[at : at + 8] = chance.choice([b"\xff" * 8, b"\xff" * 7 + b"\x7f", struct.pack("<Q", 1 << 40), bytes(8)])


def scramble(data: bytearray, chance: random.Random) -> None:
    """Write instructions of pickles in the first part, where the pickle is."""
    known = b"(.0123FGIJKLMNPQRSTUVXabcdeghijloqrstu]}\x80\x81\x82" + bytes(range(0x85, 0x95))
    for _ in range(chance.randint(1, 12)):
        data[chance.randrange(min(len(data), 1500))] = chance.choice(known)


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (flip, cut, splice, swell, scramble)


def endure(path: Path, out: Path) -> str:
    """Do all that a user can do with a file; return what came of it."""
    ends = []
    for attempt in (
        lambda: inspection_lines(inspect_file(path)),
        lambda: convert_file(path, out, "native"),
        lambda: convert_file(path, out, "apex", legacy_layout=True),
        lambda: read_checkpoint(path),
    ):
        said = None
        try:
            attempt()
        except AmpCompareError as error:
            said = str(error)
        ends.append("read" if said is None else "refused")
        assert said is None or 0 < len(said) < 1000
        assert "\n" not in (said or "")
    return " ".join(ends)


@pytest.mark.parametrize("source", SOURCES)
def test_mutated_files_are_read_or_refused(tmp_path: Path, sources: dict[str, bytes], source: str) -> None:
    """Bits, pieces, sizes and instructions changed at random: inspecting, converting and loading end in one line."""
    path, ends = tmp_path / "a.pt", []
    for number in range(EACH):
        chance = random.Random(f"{source} {number}")
        data = bytearray(sources[source])
        MUTATIONS[number % len(MUTATIONS)](data, chance)
        if data != sources[source]:
            path.write_bytes(data)
            ends.append(endure(path, tmp_path / "out.pt"))
    assert len(ends) > 0.9 * EACH
    assert any("refused refused" in end for end in ends)
    if source == "ours":  # damage never gets past the checksum
        assert all(end.endswith("refused") for end in ends)


def test_mutated_files_with_a_right_checksum(tmp_path: Path, sources: dict[str, bytes]) -> None:
    """An enemy can compute a checksum too: what is behind it is still read or refused."""
    path = tmp_path / "a.pt"
    refused = 0
    for number in range(EACH):
        chance = random.Random(f"checksum {number}")
        data = bytearray(sources["ours"][:-COMMENT_SIZE])
        MUTATIONS[number % len(MUTATIONS)](data, chance)
        data[-2:] = bytes(2)
        comment = COMMENT.format(xxhash.xxh3_128(bytes(data)).hexdigest()).encode()
        data[-2:] = len(comment).to_bytes(2, "little")
        path.write_bytes(bytes(data) + comment)
        refused += "refused" in endure(path, tmp_path / "out.pt")
    assert refused > EACH // 4


class Calls:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def bombs(mark: Path) -> dict[str, bytes]:
    """Pickles that run code, and such that would need more memory than there is."""
    name = str(mark).encode()
    deep = b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b"."
    laughs = b"\x80\x02]" + b"".join(
        b"q" + bytes([level]) + b"(" + b"h" + bytes([level]) + b"h" + bytes([level]) + b"l" for level in range(60)
    )
    return {
        "call": pickle.dumps({"state_dict": Calls(os.mkdir, str(mark))}),
        "evaluate": pickle.dumps({"model": Calls(exec, f"import os; os.mkdir({str(mark)!r})")}, protocol=0),
        "instance": b"(S'" + name + b"'\nios\nmkdir\n.",
        "object": b"\x80\x02(cos\nmkdir\nS'" + name + b"'\no.",
        "build": b"\x80\x02ccollections\nOrderedDict\n)R}(S'a'\ncos\nmkdir\nS'" + name + b"'\n\x85Rub.",
        "nested names": b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c" + bytes([len(name)]) + name + b"\x85R.",
        "deep": deep,
        "laughs": laughs + b".",
        "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
        "huge memo": b"\x80\x02]r\xff\xff\xff\xff.",
        "huge integer": b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",
        "huge text": b"\x80\x02X\xff\xff\xff\xffabc.",
        "digits": b"L" + b"9" * 100_000 + b"L\n.",
        "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"].",
    }


def in_an_archive(data: bytes, **members: bytes) -> bytes:
    """An archive as torch writes it, with a pickle of one's own."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", data)
        archive.writestr("a/version", b"3\n")
        for name, content in members.items():
            archive.writestr(f"a/data/{name}", content)
    return file.getvalue()


def before_1_6(data: bytes) -> bytes:
    head = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
    return head + data + pickle.dumps([], 2)


@pytest.mark.parametrize("kind", ["bare", "archive", "before 1.6"])
def test_bombs_do_not_go_off(tmp_path: Path, kind: str) -> None:
    """No pickle runs, hangs or takes memory, bare or inside a file of torch; those that call are refused by name."""
    mark = tmp_path / "ran"
    wrap: Callable[[bytes], bytes] = {"bare": bytes, "archive": in_an_archive, "before 1.6": before_1_6}[kind]
    for name, data in bombs(mark).items():
        path = tmp_path / "a.pt"
        path.write_bytes(wrap(data))
        assert "refused refused refused" in endure(path, tmp_path / "out.pt"), name
        assert not mark.exists(), name
        if name in ("call", "object", "nested names"):
            with pytest.raises(CheckpointError, match=r"mkdir.*|a pickle of"):
                convert_file(path, tmp_path / "out.pt", "native")


def tensor(count: str, shape: str, stride: str, offset: str = "0", kind: str = "FloatStorage") -> bytes:
    """A pickle of a model with one tensor whose sizes are free."""
    text = (
        "(dp0\nS'model'\n(dp1\nS'w'\nctorch._utils\n_rebuild_tensor_v2\n"
        f"((S'storage'\nctorch\n{kind}\nS'0'\nS'cpu'\n{count}tQ{offset}{shape}{stride}I00\n"
        "ccollections\nOrderedDict\n(tRtRss."
    )
    return text.encode()


@pytest.mark.parametrize(
    "pickled",
    [
        tensor("I4\n", "(I4\nt", "(I1\nt"),
        tensor("I4\n", "(L99999999999999999999L\nt", "(I0\nt", "I0\n"),
        tensor("I4\n", "(I99999999999\nt", "(I0\nt", "I0\n"),
        tensor("L99999999999999999999999L\n", "(I4\nt", "(I1\nt", "I0\n"),
        tensor("I99999999999\n", "(I99999999999\nt", "(I1\nt", "I0\n"),
        tensor("I4\n", "(I-4\nt", "(I1\nt", "I0\n"),
        tensor("I4\n", "(I2\nt", "(I-1\nt", "I0\n"),
        tensor("I4\n", "(I2\nt", "(I1\nt", "I99999\n"),
        tensor("I4\n", "(I2\nI2\nt", "(I1\nt", "I0\n"),
        tensor("S'4'\n", "(I2\nt", "(I1\nt", "I0\n"),
        tensor("I4\n", "(F2.0\nt", "(I1\nt", "I0\n"),
        tensor("I4\n", "(I4\nt", "(I1\nt", "I0\n", kind="system"),
        tensor("I4\n", f"({'I2' + chr(10)}{('I2' + chr(10)) * 99}t", "(I1\nt", "I0\n"),
    ],
)
def test_tensors_that_lie_about_their_size(tmp_path: Path, pickled: bytes) -> None:
    """Sizes, strides and offsets beyond the stored sixteen bytes reach no memory."""
    path = tmp_path / "a.pt"
    path.write_bytes(in_an_archive(pickled, **{"0": bytes(16)}))
    with pytest.raises(CheckpointError):
        inspect_file(path)


def test_archives_that_lie(tmp_path: Path, sources: dict[str, bytes]) -> None:
    """Compressed bombs, two entries of one name, sizes of the directory and members that lie over each other."""
    path = tmp_path / "a.pt"
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", bytes(50_000_000))
    contents = [file.getvalue()]
    good = sources["archive"]
    end = good.rindex(b"PK\x05\x06")
    for field, size in ((8, 2), (10, 2), (12, 4), (16, 4)):
        contents.append(good[: end + field] + b"\xff" * size + good[end + field + size :])
    for entry in range(4):
        at = -1
        for _ in range(entry + 1):
            at = good.index(b"PK\x01\x02", at + 1)
        for field in (20, 24, 42):
            contents.append(good[: at + field] + b"\xfe\xff\xff\xff" + good[at + field + 4 :])
            contents.append(good[: at + field] + bytes(4) + good[at + field + 4 :])
    for number, data in enumerate(contents):
        path.write_bytes(data)
        endure(path, tmp_path / f"{number}.pt")


@pytest.mark.parametrize("number", range(12))
def test_the_command_line_says_one_line(
    tmp_path: Path, sources: dict[str, bytes], number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of damaged files of each kind `convert` prints one line on stderr and ends with 2, or its result and 0."""
    source = SOURCES[number % len(SOURCES)]
    data = bytearray(sources[source])
    chance = random.Random(f"command {number}")
    MUTATIONS[number % 4](data, chance)
    path = tmp_path / "a.pt"
    path.write_bytes(data)
    for arguments in (["--inspect", str(path)], [str(path), str(tmp_path / "b.pt"), "--to", "native"]):
        code = main(["convert", *arguments])
        said = capsys.readouterr()
        assert code in (0, 2)
        assert "Traceback" not in said.err
        if code == 2:
            assert len(said.err.splitlines()) == 1
            assert not said.out
