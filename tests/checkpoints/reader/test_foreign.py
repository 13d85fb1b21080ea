"""Files of any program, read without running what they hold."""

import collections
import datetime
import importlib
import io
import os
import pickle
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ampcompare.base.errors import CheckpointError
from ampcompare.checkpoints.reader import unpickler
from ampcompare.checkpoints.reader.foreign import open_checkpoint
from ampcompare.checkpoints.reader.placeholders import NotPickled
from ampcompare.checkpoints.store.file import write_checkpoint

Namespace = importlib.import_module("argparse").Namespace
FORMATS = [("torch archive", True), ("torch before 1.6", False)]


def everything() -> dict[str, Any]:
    """What scripts put beside their tensors."""
    shared = torch.arange(24.0).reshape(4, 6)
    return {
        "model": collections.OrderedDict(
            weight=shared,
            rows=shared[1:3, ::2],
            columns=shared.t(),
            half=torch.ones(3).half(),
            bf16=torch.ones(2, dtype=torch.bfloat16),
            counts=torch.tensor(7),
            mask=torch.tensor([True, False]),
            empty=torch.zeros(0, 3),
            pair=torch.tensor([1 + 2j]),
            conjugate=torch.tensor([1 + 2j]).conj(),
            imaginary=torch.tensor([1 + 2j, 3 + 4j]).conj().imag,
            float8=torch.ones(3).to(torch.float8_e4m3fn),
            wide=torch.arange(6).to(torch.uint32)[2:],
        ),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "args": Namespace(lr=0.1, out=Path("a") / "b", nested=Namespace(x=[1, (2, None)])),
        "metric": np.float32(0.5),
        "table": np.arange(6.0).reshape(2, 3),
        "defaults": collections.defaultdict(list, {1: b"two"}),
        "names": {"only"},
        "device": torch.device("cpu"),
        "dtype": torch.float16,
        "size": torch.Size([1, 2]),
        "big": 2**80,
        "text": "ä\udc80",
        "complex": 1 + 2j,
        "when": datetime.timedelta(1),
    }


def bytes_of(tensor: torch.Tensor) -> list[int]:
    """The elements of a tensor as bytes, whatever its dtype."""
    return tensor.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8).tolist()


@pytest.mark.parametrize("format, as_archive", FORMATS)
@pytest.mark.parametrize("protocol", [2, 5])
def test_what_scripts_save_is_read_without_running_anything(
    tmp_path: Path, format: str, as_archive: bool, protocol: int
) -> None:
    """Tensors equal torch's own to the last bit; holders of values become plain data; nothing is left out or called."""
    path = tmp_path / "a.pt"
    saved = everything()
    torch.save(saved, path, _use_new_zipfile_serialization=as_archive, pickle_protocol=protocol)
    contents = open_checkpoint(path)
    found, left_out, changed = contents.plain_contents()
    assert (contents.format, contents.calls, left_out) == (format, [], [])
    for name, tensor in saved["model"].items():
        assert found["model"][name].dtype is tensor.dtype
        assert bytes_of(found["model"][name]) == bytes_of(tensor)
        assert found["model"][name].stride() == tensor.stride() or tensor.is_neg()
    found["model"]["weight"].zero_()
    assert not found["model"]["rows"].any(), "tensors that shared memory share it again"
    assert isinstance(found["parameter"], torch.nn.Parameter)
    assert torch.equal(found["parameter"], torch.ones(2))
    assert found["args"] == {"lr": 0.1, "out": "a/b", "nested": {"x": [1, (2, None)]}}
    assert torch.equal(found["table"], torch.arange(6.0, dtype=torch.float64).reshape(2, 3))
    assert (found["metric"], found["defaults"], found["names"]) == (0.5, {1: b"two"}, {"only"})
    assert (found["device"], found["dtype"], found["size"]) == (
        torch.device("cpu"),
        torch.float16,
        torch.Size([1, 2]),
    )
    assert (found["big"], found["text"], found["complex"]) == (2**80, "ä\udc80", 1 + 2j)
    assert found["when"] == 86400.0
    named = {name.partition(".")[0] for line in changed for name in line.partition(":")[0].split(", ")}
    assert named == {"args", "metric", "table", "defaults", "when"}


@pytest.mark.parametrize("as_archive", [True, False])
def test_objects_are_named_by_place_and_left_out(tmp_path: Path, as_archive: bool) -> None:
    """A pickled module is not built, but read as its state dict; the classes that unpickling would call are listed."""
    path = tmp_path / "a.pt"
    net = torch.nn.Linear(2, 2)
    holder = {"epoch": 3, "net": [net], "hook": os.getcwd, "opt": collections.Counter("aab")}
    torch.save(holder, path, _use_new_zipfile_serialization=as_archive)
    contents = open_checkpoint(path)
    found, left_out, changed = contents.plain_contents()
    assert changed == ["net.0: torch.nn.modules.linear.Linear as its state dict"]
    assert left_out == [f"hook: {os.getcwd.__module__}.getcwd"]
    assert contents.calls == ["torch.nn.modules.linear.Linear"]
    assert torch.equal(found["net"].pop()["weight"], net.weight)
    assert found == {"epoch": 3, "net": [], "hook": None, "opt": {"a": 2, "b": 1}}


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def bombs(mark: Path) -> dict[str, bytes]:
    """Pickles that would make a folder, by each instruction that reaches code."""
    name = str(mark).encode()
    return {
        "protocol 0": pickle.dumps(Calls(os.mkdir, str(mark)), 0),
        "protocol 5": pickle.dumps(Calls(os.mkdir, str(mark)), 5),
        "instance": b"(S'" + name + b"'\nios\nmkdir\n.",
        "state": b"\x80\x02ccollections\nOrderedDict\n)R}(S'a'\ncos\nmkdir\nS'" + name + b"'\n\x85Rub.",
        "getattr": b"\x80\x02cbuiltins\ngetattr\ncos\n__dict__\nS'mkdir'\n\x86RS'" + name + b"'\n\x85R.",
    }


def test_nothing_is_called(tmp_path: Path) -> None:
    """Pickles that would make a folder leave no trace but names, bare, in an archive, and before torch 1.6."""
    mark = tmp_path / "ran"
    path = tmp_path / "a.pt"
    for kind, data in bombs(mark).items():
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("a/data.pkl", data)
        head = b"".join(
            pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})
        )
        wrapped = [archive.getvalue(), head + data + pickle.dumps([], 2)]
        for content in [data, *wrapped] if data.startswith(b"\x80") else wrapped:
            path.write_bytes(content)
            try:
                contents = open_checkpoint(path)
            except CheckpointError:
                assert kind == "getattr"  # what stands for a result cannot be called
            else:
                assert contents.calls or contents.plain_contents()[1], kind
        assert not mark.exists(), kind


class Hub(dict[str, Any]):
    """A subclass of dict of a user's program."""


class Row(list[Any]):
    """A subclass of list of a user's program."""


def test_subclasses_of_list_and_dict_are_placeholders(tmp_path: Path) -> None:
    """What fills them reaches nothing; they are named, and left out."""
    hub, row = Hub(a=1), Row([1, 2])
    hub.own = row.own = 3  # type: ignore[attr-defined]
    for protocol in (2, 5):
        torch.save({"hub": hub, "row": row}, tmp_path / "a.pt", pickle_protocol=protocol)
        contents = open_checkpoint(tmp_path / "a.pt")
        assert [place.partition(":")[0] for place in contents.plain_contents()[1]] == ["hub", "row"]
        assert contents.plain_contents()[0] == {"hub": None, "row": None}


@pytest.mark.parametrize("as_archive", [True, False])
def test_a_file_that_was_cut_is_refused(tmp_path: Path, as_archive: bool) -> None:
    """Wherever a copy of it ended."""
    path = tmp_path / "a.pt"
    torch.save(everything(), path, _use_new_zipfile_serialization=as_archive)
    whole = path.read_bytes()
    for end in (len(whole) // 12, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path).plain_contents()
        assert "\n" not in str(caught.value)


def test_what_holds_itself_and_what_explodes(tmp_path: Path) -> None:
    """A list inside itself and a thousand million references to one list take neither time nor memory."""
    loop: list[Any] = [1]
    loop.append(loop)
    laughs: Any = ["lol"]
    for _ in range(60):
        laughs = [laughs] * 10
    deep: Any = []
    for _ in range(5000):
        deep = (deep,)
    path = tmp_path / "a.pt"
    path.write_bytes(pickle.dumps({"loop": loop, "laughs": laughs}))
    contents = open_checkpoint(path)
    found, left_out, _ = contents.plain_contents()
    assert (found["loop"], left_out) == ([1, None], ["loop.1: what it lies in, once more"])
    path.write_bytes(b"\x80\x02" + b")" + b"\x85" * 100_000 + b".")
    with pytest.raises(CheckpointError, match="nested deeper"):
        open_checkpoint(path).plain_contents()


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "is empty"),
        (b"hello, world, this is text", "neither an archive nor a pickle"),
        (b"\x80\x02", r"ends too early|broken"),
        (b"\x80\x02K\x01K\x02R.", "broken"),
        (b"\x80\x02]r\xff\xff\xff\xff.", "more memory than its size explains"),
        (b"PK\x03\x04" + bytes(80), "is damaged"),
    ],
)
def test_broken_files_are_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    """Each way of being no checkpoint has its own words, and no traceback."""
    path = tmp_path / "a.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_pickle_is_read_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that keeps the process busy ends with an error."""
    monkeypatch.setattr(unpickler, "MIN_SECONDS", 1)
    with pytest.raises(NotPickled, match="more time than its size explains"):
        unpickler.require_readable_in_bounded_child(lambda: time.sleep(60), 10)
    unpickler.require_readable_in_bounded_child(lambda: None, 10)


def test_archives_of_other_kinds_are_refused(tmp_path: Path) -> None:
    """TorchScript, a zip of something else, compressed members, and another byte order."""
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}

    def rewritten(changes: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, data in {**members, **changes}.items():
                archive.writestr(name, data)
        return path

    assert torch.equal(open_checkpoint(rewritten({})).plain_contents()[0]["a"], torch.ones(2))
    with pytest.raises(CheckpointError, match="TorchScript"):
        open_checkpoint(rewritten({"a/constants.pkl": b""}))
    with pytest.raises(CheckpointError, match="is compressed"):
        open_checkpoint(rewritten({}, zipfile.ZIP_DEFLATED))
    with pytest.raises(CheckpointError, match="byte order"):
        open_checkpoint(rewritten({"a/byteorder": b"big"}))
    with pytest.raises(CheckpointError, match="none that torch"):
        open_checkpoint(rewritten({"b/data.pkl": b""}))
    with pytest.raises(CheckpointError, match="reaches beyond"):
        open_checkpoint(rewritten({"a/data/0": b"1"})).plain_contents()


def test_safetensors_and_ours(tmp_path: Path, make_state: Any) -> None:
    """Weights alone are read, and so is a checkpoint of ours, with its comment."""
    path = tmp_path / "a.safetensors"
    save_file({"weight": torch.ones(2)}, path)
    contents = open_checkpoint(path)
    assert contents.format == "safetensors"
    assert torch.equal(contents.plain_contents()[0]["weight"], torch.ones(2))
    write_checkpoint(path, make_state())
    contents = open_checkpoint(path)
    assert contents.comment.startswith(b"ampcompare checkpoint 1")
    assert contents.calls == []
