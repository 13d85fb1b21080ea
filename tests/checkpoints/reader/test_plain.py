"""Values of a file that is read without running it: kept as they are, or in another form that is named.

Whatever is written again, `torch.load` opens with its defaults.
"""

import collections
import datetime
import decimal
import fractions
import importlib
import io
import zipfile
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch

from ampcompare.base.errors import CheckpointError
from ampcompare.checkpoints.reader.foreign import open_checkpoint
from ampcompare.checkpoints.reader.unpickler import QUANTIZED
from ampcompare.cli import main

Namespace = importlib.import_module("argparse").Namespace
DAY = datetime.datetime(2024, 1, 2, 3, 4, 5, 6)
ZONE = datetime.timezone(datetime.timedelta(hours=2))
STATE = torch.nn.BatchNorm1d(3).state_dict()
KEPT: dict[str, Any] = {
    "none": None,
    "big": -(2**300),
    "text": "ä\udc80\n",
    "bytes": b"\x00\xff",
    "bytearray": bytearray(b"ab\xff"),
    "complex": 1 - 2j,
    "set": {1, "two", (3, 4)},
    "empty set": set(),
    "tuple keys": {(1, "a"): 2, ("b", (None, 2.5)): [3]},
    "other keys": {7: "i", 2.5: "f", True: "b", None: "n", b"k": "y", torch.float16: "d", 1j: "c"},
    "counter": collections.Counter("aab"),
    "ordered": collections.OrderedDict(b=1, a=2),
    "state dict": STATE,
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 1),
    "size": torch.Size([1, 2]),
    "parameter": torch.nn.Parameter(torch.rand(2)),
    "frozen parameter": torch.nn.Parameter(torch.rand(2), requires_grad=False),
    "with gradient": torch.rand(2, requires_grad=True),
    "nan": float("inf"),
    "nested": [({"a": {(1,): {2}}},)],
}
CHANGED: dict[str, tuple[Any, Any, str]] = {
    "path": (Path("/data/run 1") / "x.pt", "/data/run 1/x.pt", "pathlib.PosixPath as text"),
    "relative": (Path("a/b"), "a/b", "pathlib.PosixPath as text"),
    "drive": (PureWindowsPath("C:\\a\\b"), "C:\\a\\b", "pathlib.PureWindowsPath as text"),
    "datetime": (DAY, DAY.isoformat(), "datetime.datetime as text"),
    "zoned": (DAY.replace(tzinfo=ZONE), DAY.replace(tzinfo=ZONE).isoformat(), "datetime.datetime as text"),
    "date": (DAY.date(), "2024-01-02", "datetime.date as text"),
    "time": (DAY.time(), DAY.time().isoformat(), "datetime.time as text"),
    "delta": (datetime.timedelta(1, 2, 3), 86402.000003, "datetime.timedelta as a number"),
    "zone": (ZONE, "UTC+02:00", "datetime.timezone as text"),
    "decimal": (decimal.Decimal("1.10"), "1.10", "decimal.Decimal as text"),
    "fraction": (fractions.Fraction(1, 3), "1/3", "fractions.Fraction as text"),
    "namespace": (Namespace(lr=0.1, x=(1, 2)), {"lr": 0.1, "x": (1, 2)}, "argparse.Namespace as a dict"),
    "frozenset": (frozenset({1, (2, 3)}), {1, (2, 3)}, "frozenset as a set"),
    "paths": ({Path("a")}, {"a"}, "pathlib.PosixPath as text"),
    "path key": ({Path("a"): 1}, {"a": 1}, "pathlib.PosixPath as text"),
    "numpy key": ({np.int64(3): 1}, {3: 1}, "numpy.int64 as a number"),
    "defaults": (collections.defaultdict(list, a=[1]), {"a": [1]}, "collections.defaultdict as a dict"),
    "queue": (collections.deque([1, 2], 3), [1, 2], "collections.deque as a list"),
    "numpy dtype": (np.dtype("float32"), "<f4", "numpy.dtype as text"),
    "numpy number": (np.float64(0.1), 0.1, "numpy.float64 as a number"),
    "numpy bool": (np.bool_(True), True, "numpy.bool as a bool"),
    "numpy complex": (np.complex64(1j), 1j, "numpy.complex64 as a number"),
    "array": (np.arange(3), torch.arange(3), "numpy.ndarray as a plain tensor"),
    "set of namespaces": (frozenset({frozenset({1})}), [{1}], "frozenset as a list"),
}
LEFT_OUT = {"range": range(3), "ellipsis": ..., "slice": slice(1), "function": len, "texts": np.array(["a"])}


def same(one: Any, other: Any) -> bool:
    """Return whether values, classes and attributes are equal, of all parts."""
    if isinstance(one, torch.Tensor):
        alike = (
            type(one) is type(other) and one.dtype is other.dtype and one.requires_grad == other.requires_grad
        )
        return alike and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        attributes = getattr(one, "__dict__", None), getattr(other, "__dict__", None)
        if (any(attributes) and not same(*attributes)) or list(map(type, one)) != list(map(type, other)):
            return False
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def written(value: Any, path: Path, **options: Any) -> Any:
    torch.save(value, path, **options)
    return open_checkpoint(path).plain_contents()


def loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "options", [{}, {"pickle_protocol": 4}, {"_use_new_zipfile_serialization": False}], ids=str
)
def test_values_that_torch_loads_are_kept(tmp_path: Path, options: dict[str, Any]) -> None:
    """With class, order, attributes and gradient flags: nothing is named as changed, and `torch.load` gives it back."""
    value, left_out, changed = written(KEPT, tmp_path / "a.pt", **options)
    assert (left_out, changed) == ([], [])
    for name, kept in KEPT.items():
        assert same(value[name], kept), name
        assert same(loaded(value)[name], kept), name


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("protocol", [2, 4])
def test_values_in_another_form_are_named(tmp_path: Path, name: str, protocol: int) -> None:
    before, after, line = CHANGED[name]
    value, left_out, changed = written({"held": {name: before}}, tmp_path / "a.pt", pickle_protocol=protocol)
    assert same(value["held"][name], after)
    assert left_out == []
    assert any(entry.startswith(f"held.{name}") and entry.endswith(f": {line}") for entry in changed)
    assert same(loaded(value), value)


def test_what_has_no_plain_form_is_left_out_by_name(tmp_path: Path) -> None:
    value, left_out, _ = written(LEFT_OUT, tmp_path / "a.pt")
    assert value == dict.fromkeys(LEFT_OUT)
    assert [line.partition(":")[0] for line in left_out] == list(LEFT_OUT)
    assert loaded(value) == value


def test_keys_that_would_be_one_are_named(tmp_path: Path) -> None:
    """Of a path and a text of equal letters, the second entry is left out by name."""
    value, left_out, _ = written({"a": 1, Path("a"): 2}, tmp_path / "a.pt")
    assert value == {"a": 1}
    assert left_out == ["a: a second entry, under a key of class pathlib.PosixPath"]


def test_many_values_of_one_list_take_one_line(tmp_path: Path) -> None:
    """All places are in the lines, and a long list is named once."""
    history = {"losses": [np.float64(x) for x in range(500)], **{f"path {at}": Path("x") for at in range(3)}}
    history |= {f"group {at}": {"path": Path("y")} for at in range(60)}
    _, _, changed = written(history, tmp_path / "a.pt")
    assert "500 values in losses: numpy.float64 as a number" in changed
    assert all(len(line) < 400 for line in changed)
    assert all(f"group {at}.path" in " ".join(changed) for at in range(60))


def test_attributes_and_classes_of_tensors_are_named(tmp_path: Path) -> None:
    """A parameter's own attributes, and a subclass of tensors, are lost, and said to be."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    value, left_out, changed = written(
        {"p": parameter, "t": torch.ones(1).as_subclass(OwnTensor)}, tmp_path / "a.pt"
    )
    assert left_out == []
    assert [line.partition(" as ")[2] for line in changed] == ["a plain parameter", "a plain tensor"]
    assert "with attributes" in changed[0]
    assert "OwnTensor" in changed[1]
    assert same(loaded(value)["t"], torch.ones(1))


class OwnTensor(torch.Tensor):
    """A class of tensors of a user's program."""


@pytest.mark.parametrize("as_archive", [True, False])
@pytest.mark.filterwarnings("ignore:.*(TypedStorage|torch.quantize).*")
def test_quantized_and_8_bit_tensors_are_read(tmp_path: Path, as_archive: bool) -> None:
    """An intact file of them is not damaged; they are what torch itself loads."""
    if not all(hasattr(torch, name) for name in QUANTIZED.values()):
        pytest.skip("torch has no quantized types any more")
    held = {
        "tensor": torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 3, torch.qint8),
        "channel": torch.quantize_per_channel(
            torch.randn(3, 4), torch.rand(3), torch.zeros(3), 0, torch.quint8
        ),
        "wide": torch.quantize_per_tensor(torch.randn(3), 0.1, 3, torch.qint32)[1:],
    }
    float8 = {
        name: torch.randn(4, 4).to(getattr(torch, name)) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
        if hasattr(torch, name)
    }  # fmt: skip
    torch.save({"model": {"w": torch.ones(2, 2), **held, **float8}}, tmp_path / "a.pt",
               _use_new_zipfile_serialization=as_archive)  # fmt: skip
    value, left_out, changed = open_checkpoint(tmp_path / "a.pt").plain_contents()
    assert (left_out, changed) == ([], [])
    for name, tensor in held.items():
        assert torch.equal(value["model"][name].int_repr(), tensor.int_repr())
        assert torch.equal(value["model"][name].dequantize(), tensor.dequantize())
    assert torch.equal(loaded(value)["model"]["channel"].dequantize(), held["channel"].dequantize())
    for name, tensor in float8.items():
        assert torch.equal(value["model"][name].float(), tensor.float())
    assert main(["convert", str(tmp_path / "a.pt"), "--inspect"]) == 0


def test_a_changed_bit_is_in_the_part_that_has_it(tmp_path: Path) -> None:
    """The values of a tensor are damaged, not the pickle."""
    path = tmp_path / "a.pt"
    torch.save({"model": {"w": torch.full((64,), 1.5)}}, path)
    with zipfile.ZipFile(path) as archive:
        places = {info.filename.partition("/")[2]: info.header_offset for info in archive.infolist()}
    for name, says in (
        ("data/0", "in the values of a tensor"),
        ("data.pkl", "in its description of what it holds"),
    ):
        content = bytearray(path.read_bytes())
        header = places[name]
        begin = header + 30 + int.from_bytes(content[header + 26 : header + 28], "little")
        begin += int.from_bytes(content[header + 28 : header + 30], "little")
        content[begin + 20] ^= 1
        (tmp_path / "b.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match="is damaged") as caught:
            open_checkpoint(tmp_path / "b.pt").plain_contents()
        assert says in str(caught.value)
        assert "pickle" not in str(caught.value)


def test_an_archive_without_checksums_is_intact(tmp_path: Path) -> None:
    """torch can be asked to write none."""
    path = tmp_path / "a.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"model": {"w": torch.arange(5.0)}}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(open_checkpoint(path).plain_contents().value["model"]["w"], torch.arange(5.0))
