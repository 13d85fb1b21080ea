"""Read a pickle without importing or running what it names: calls make plain data, tensors, or placeholders.

Python's own `pickle.Unpickler` asks `find_class` for each class and function that a file names. Here it gets a class
that is made for the name and imports nothing. What pickle then does with it, calling it, filling it as a list or a dict
and giving it a state, reaches the methods of `Opaque` and the builders of this file alone.

Names and arguments are those that torch 1.0 to 2.13, NumPy 1 and 2 and Python 2 and 3 write.
"""

import math
import os
import pickle
import re
import signal
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import IO, Any

import numpy
import torch
from torch import Tensor, nn

from ampcompare.base.errors import AmpCompareError
from ampcompare.checkpoints.reader.placeholders import NotPickled, OpaqueObject, PlaceholderMetaclass

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "UntypedStorage": torch.uint8,
    "QInt8Storage": torch.int8,
    "QUInt8Storage": torch.uint8,
    "QInt32Storage": torch.int32,
}
QUANTIZED = {torch.int8: "qint8", torch.uint8: "quint8", torch.int32: "qint32"}
"""The quantized type of the elements of a storage. torch is about to drop these types."""
FREE_ELEMENTS = 1 << 20  # of a tensor that repeats what is stored
MIN_BYTES = 256 << 20
BYTES_PER_BYTE = 5
MIN_SECONDS = 120
BYTES_PER_SECOND = 10e6  # of a slow disk


class _Unpickler(pickle.Unpickler):
    """Unpickles without running what a file names: only plain data and tensors are made, placeholders for all else."""

    def __init__(self, file: IO[bytes], persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(file, encoding="latin1")  # texts of Python 2, and the bytes of its arrays
        self.persistent = persistent
        self.globals: dict[str, Any] = {}
        self.calls: dict[str, None] = {}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype | torch.qscheme):
            return kind
        if full not in self.globals:
            self.globals[full] = PlaceholderMetaclass(
                full, (OpaqueObject,), {"name": full, "builder": BUILDERS.get(full), "calls": self.calls}
            )
        return self.globals[full]

    def persistent_load(self, identity: Any) -> Any:
        if self.persistent is None:
            raise NotPickled("it refers to something outside")
        return self.persistent(identity)


def unpickled_value_and_calls(
    file: IO[bytes], persistent: Callable[[Any], Any] | None = None
) -> tuple[Any, list[str]]:
    """Read one pickle from the position of `file`, and leave the position after it.

    `persistent` gives the one-dimensional tensor, or a class, for a persistent id; torch names storages so. Returns
    what it holds, of dicts, lists, tuples, sets, plain values, tensors, `Global` and `Opaque`; and the names of what
    unpickling would call, beyond plain data and tensors, each once, in order.
    """
    unpickler = _Unpickler(file, persistent)
    try:
        root = unpickler.load()
    except (AmpCompareError, MemoryError, NotPickled, zipfile.BadZipFile):
        raise  # of what lies outside of the pickle, or said already
    except Exception as error:  # pickle lets through what its own steps raise on bytes that are none
        raise NotPickled(f"its pickle is broken ({type(error).__name__})") from None
    return root, list(unpickler.calls)


def require_readable_in_bounded_child(read: Callable[[], Any], size: int) -> None:
    """Read in a child process whose memory and time are limited by the bytes of the file, and throw away what it read.

    A damaged pickle may ask for any amount of memory in a few bytes. Where a process cannot be forked, nothing is
    limited.
    """
    if not hasattr(os, "fork"):
        return
    import resource

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child reads, and ends
        child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(MIN_SECONDS + size / BYTES_PER_SECOND))
            with open("/proc/self/statm", encoding="ascii") as file:
                held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            most = held + max(MIN_BYTES, BYTES_PER_BYTE * size)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            read()
        except MemoryError:
            os._exit(1)
        except BaseException:
            pass  # the caller reads again, and says what is wrong
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code:
        what = "time" if code == -signal.SIGALRM else "memory"
        raise NotPickled(f"its pickle is broken: reading it would take more {what} than its size explains")


def parse_storage_key_type_and_count(identity: Any) -> tuple[str, torch.dtype, int]:
    """Return key, type and number of elements of a persistent id: ("storage", class, key, device, n)."""
    if not isinstance(identity, tuple) or len(identity) < 5 or identity[0] != "storage":
        raise NotPickled("it refers to something outside that is not a storage")
    kind = identity[1]  # such as `torch.cuda.HalfStorage`
    name = kind.name.rpartition(".")[2] if isinstance(kind, PlaceholderMetaclass) else type(kind).__name__
    if name not in STORAGES:
        raise NotPickled(f"a storage is a {name}")
    return str(identity[2]), STORAGES[name], int(identity[4])


def _make_tensor(
    storage: Tensor,
    offset: int,
    shape: Any,
    stride: Any,
    grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> Tensor:
    return _make_tensor_of_dtype(storage, offset, shape, stride, grad, hooks, storage.dtype, metadata)


def _make_tensor_of_dtype(
    storage: Tensor,
    offset: int,
    shape: Any,
    stride: Any,
    grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Tensor:
    """Return a tensor that looks into a storage, which may be filled later; those that share memory share it here."""
    if 0 in shape:
        return torch.empty(tuple(shape), dtype=dtype)
    held = storage[: storage.nbytes // dtype.itemsize * dtype.itemsize // storage.itemsize].view(dtype)
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    if not offset + reach <= len(held) or math.prod(shape) > max(len(held), FREE_ELEMENTS):
        raise NotPickled(f"a tensor reaches beyond its {held.nbytes} stored bytes")
    view = held.as_strided(shape, stride, offset)
    view = view.conj() if metadata and metadata.get("conj") else view
    view = torch._neg_view(view) if metadata and metadata.get("neg") else view
    return view.requires_grad_() if grad is True and (view.is_floating_point() or view.is_complex()) else view


def _make_parameter(data: Any, grad: Any = True, hooks: Any = None) -> Any:
    if not isinstance(data, Tensor):
        return data
    return nn.Parameter(data.detach(), grad is True and (data.is_floating_point() or data.is_complex()))


def _make_parameter_with_attributes(data: Any, grad: Any, hooks: Any, state: Any) -> Any:
    return _wrap_as_opaque_object(_make_parameter(data, grad), "torch.nn.Parameter with attributes")


def _make_tensor_of_class(function: Any, kind: Any, arguments: Any, state: Any) -> Any:
    """Return a tensor of a class of its own, or with attributes of its own, as a plain one; the class is noted."""
    made = function(*arguments)
    name = kind.name if isinstance(kind, PlaceholderMetaclass) else type(kind).__name__
    if name not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
        return _wrap_as_opaque_object(made, name)
    return _wrap_as_opaque_object(made, f"{name} with attributes") if state else made


def _wrap_as_opaque_object(value: Any, class_name: str) -> Any:
    """Return what stands for an object whose class is read as another: `value` is what it was read as."""
    if isinstance(value, OpaqueObject):
        return value
    holder = OpaqueObject.make_without_noting_call(class_name, ())
    holder.value = value
    return holder


def _make_quantized_tensor(
    storage: Tensor,
    offset: int,
    shape: Any,
    stride: Any,
    quantizer: Any,
    grad: Any = False,
    hooks: Any = None,
) -> Any:
    view = _make_tensor(storage, offset, shape, stride)  # checks that it lies within the storage
    kind = getattr(torch, QUANTIZED[storage.dtype], None)
    if kind is None or storage.device.type == "meta":
        return OpaqueObject.make_without_noting_call("torch._utils._rebuild_qtensor", ())
    scheme, *values = quantizer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both types are deprecated, and a file may hold them all the same
        if scheme is torch.per_tensor_affine:
            made = torch._empty_affine_quantized(
                view.shape, scale=values[0], zero_point=values[1], dtype=kind
            )
        else:
            scales, zeros, axis = values
            made = torch._empty_per_channel_affine_quantized(
                view.shape, scales=scales, zero_points=zeros, axis=axis, dtype=kind
            )
        typed = torch.storage.TypedStorage(wrap_storage=storage.untyped_storage(), dtype=kind, _internal=True)
        return made.set_(typed, offset, tuple(shape), tuple(stride))


class DefaultDictPlaceholder(OrderedDict[Any, Any]):
    """What stands for a `defaultdict`, until pickle has filled it."""


class DequePlaceholder(list[Any]):
    """What stands for a `deque`, until pickle has filled it."""


def _make_numpy_dtype_placeholder(*arguments: Any) -> Any:
    code = arguments[0]
    made = OpaqueObject.make_without_noting_call("numpy.dtype", arguments)
    if isinstance(code, str) and re.fullmatch("[fiub][1248]|c8|c16", code):
        made.value = numpy.dtype(code)
        made.receive = _set_byte_order
    return made


def _set_byte_order(placeholder: OpaqueObject, state: Any) -> None:
    if isinstance(state, tuple) and len(state) > 1 and state[1] == ">":
        placeholder.value = placeholder.value.newbyteorder(">")


def _make_numpy_scalar(kind: Any, data: Any) -> Any:
    if kind.value is None or len(data) != kind.value.itemsize:
        return OpaqueObject.make_without_noting_call("numpy.scalar", (kind, data))
    return _wrap_as_opaque_object(
        numpy.frombuffer(_text_to_bytes(data), kind.value)[0].item(), f"numpy.{kind.value.name}"
    )


def _make_numpy_array_placeholder(*arguments: Any) -> Any:
    """Return what stands for an array, empty until its state comes; it is carried as a tensor."""
    made = OpaqueObject.make_without_noting_call("numpy.ndarray", ())
    made.receive = _fill_numpy_array
    return made


def _make_numpy_from_buffer(data: Any, kind: Any, shape: Any, order: Any = "C") -> Any:
    made = _make_numpy_array_placeholder()
    _fill_numpy_array(made, (1, shape, kind, order != "C", data))
    return made


def _fill_numpy_array(placeholder: OpaqueObject, state: Any) -> None:
    _, shape, kind, in_columns, data = state
    if in_columns or isinstance(data, list):  # a list holds objects
        return
    if isinstance(kind, OpaqueObject) and kind.value is not None:
        array = numpy.frombuffer(_text_to_bytes(data), kind.value).reshape(shape)
        placeholder.value = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def _text_to_bytes(data: Any) -> bytes:
    """Return bytes, which protocol 2 writes as text."""
    return data.encode("latin-1") if isinstance(data, str) else bytes(memoryview(data))


BUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _make_tensor,
    "torch._utils._rebuild_tensor_v2": _make_tensor,
    "torch._utils._rebuild_tensor_v3": _make_tensor_of_dtype,
    "torch._utils._rebuild_qtensor": _make_quantized_tensor,
    "torch._utils._rebuild_parameter": _make_parameter,
    "torch._utils._rebuild_parameter_with_state": _make_parameter_with_attributes,
    "torch.nn.parameter.Parameter": _make_parameter,
    "torch._tensor._rebuild_from_type_v2": _make_tensor_of_class,
    "torch.Size": lambda sizes=(): torch.Size(sizes),
    "torch.device": torch.device,
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "collections.defaultdict": lambda factory=None, *items: DefaultDictPlaceholder(*items),
    "collections.deque": lambda items=(), longest=None: DequePlaceholder(items),
    "_codecs.encode": lambda text, encoding="latin1": _text_to_bytes(text),
    **{
        f"{module}.{name}": build
        for module in ("builtins", "__builtin__")
        for name, build in (
            ("dict", dict),
            ("list", list),
            ("set", set),
            ("frozenset", frozenset),
            ("bytearray", lambda data=b"", encoding="": bytearray(_text_to_bytes(data))),
            ("complex", complex),
        )
    },
    **{f"{module}._reconstructor": lambda kind, base, state: kind() for module in ("copyreg", "copy_reg")},
    "numpy.dtype": _make_numpy_dtype_placeholder,
    **{
        f"{module}.{name}": build
        for module in ("numpy.core", "numpy._core")
        for name, build in (
            ("multiarray.scalar", _make_numpy_scalar),
            ("multiarray._reconstruct", _make_numpy_array_placeholder),
            ("numeric._frombuffer", _make_numpy_from_buffer),
        )
    },
}
