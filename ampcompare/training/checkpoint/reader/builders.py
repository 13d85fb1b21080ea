"""The calls of a pickle that make plain data and tensors, done without the functions that they name.

Names and arguments are those that torch 1.0 to 2.13, NumPy 1 and 2 and Python 2 and 3 write.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import torch

from ampcompare.training.checkpoint.reader.placeholders import Global, NotPickled, Opaque, StoredTensor

__all__ = ["BUILDERS", "CONSTANTS", "Build", "Storage", "require_short", "storage_dtype"]

Call = Callable[[Any, Any], Any]
Build = Callable[[tuple[Any, ...], Call], Any]

DTYPES = {
    name: dtype
    for name in dir(torch)
    if isinstance(dtype := getattr(torch, name), torch.dtype) and not str(dtype).startswith(("torch.q", "torch.uint1b"))
}
CONSTANTS: dict[str, Any] = {f"torch.{name}": dtype for name, dtype in DTYPES.items()}
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
}
LARGEST = 1 << 62
FREE_ELEMENTS = 1 << 20
LONGEST_KEY = 10_000


class Storage:
    """The bytes that tensors look into.

    Args:
        key: name inside the file.
        dtype: type of its elements.
        count: number of its elements, as the pickle claims.
    """

    def __init__(self, key: str, dtype: torch.dtype, count: int, device: str) -> None:
        if not isinstance(key, str) or type(count) is not int or not 0 <= count < LARGEST:
            raise NotPickled("a storage has no usable name or size")
        if not isinstance(device, str):
            raise NotPickled("a storage has no usable device")
        self.key, self.dtype, self.count, self.device = key, dtype, count, device[:40]


def storage_dtype(kind: Any) -> torch.dtype:
    """Return the type of the elements of a storage class, such as `torch.cuda.HalfStorage`.

    Raises:
        NotPickled: no such storage is known.
    """
    name = kind.name.rpartition(".")[2] if isinstance(kind, Global) else ""
    if name not in STORAGES:
        raise NotPickled(f"a storage is a {kind.name if isinstance(kind, Global) else type(kind).__name__}")
    return STORAGES[name]


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > 64:
        raise NotPickled("a tensor has no usable shape")
    for size in value:
        if type(size) is not int or not 0 <= size < LARGEST:
            raise NotPickled("a tensor has no usable shape")
    return tuple(value)


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, dtype: torch.dtype | None = None) -> StoredTensor:
    if not isinstance(storage, Storage):
        raise NotPickled("a tensor has no storage")
    sizes, steps = _sizes(shape), _sizes(stride)
    if len(sizes) != len(steps) or type(offset) is not int or not 0 <= offset < LARGEST:
        raise NotPickled("a tensor has no usable shape")
    made = StoredTensor(storage.key, dtype or storage.dtype, storage.count, offset, sizes, steps, storage.device)
    reach = offset + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) + 1
    held = storage.count * storage.dtype.itemsize // made.dtype.itemsize
    if made.count and (reach > held or made.count > max(held, FREE_ELEMENTS)):
        raise NotPickled(f"a tensor of shape {list(sizes)[:8]} reaches beyond its {held} stored elements")
    return made


def _rebuild_tensor(arguments: tuple[Any, ...], call: Call) -> StoredTensor:
    storage, offset, shape, stride = arguments[:4]
    return _with_flags(_tensor(storage, offset, shape, stride), arguments[6:7])


def _with_flags(made: StoredTensor, metadata: tuple[Any, ...]) -> StoredTensor:
    if metadata and isinstance(metadata[0], dict):
        made.conjugate, made.negative = bool(metadata[0].get("conj")), bool(metadata[0].get("neg"))
    return made


def _rebuild_v3(arguments: tuple[Any, ...], call: Call) -> StoredTensor:
    dtype = arguments[6]
    if not isinstance(dtype, torch.dtype):
        raise NotPickled("a tensor has no known dtype")
    storage, offset, shape, stride = arguments[:4]
    return _with_flags(_tensor(storage, offset, shape, stride, dtype), arguments[7:8])


def _first(arguments: tuple[Any, ...], call: Call) -> Any:
    return arguments[0]


def _rebuild_from_type(arguments: tuple[Any, ...], call: Call) -> Any:
    return call(arguments[0], arguments[2])


def _dict(arguments: tuple[Any, ...], call: Call) -> Any:
    made: OrderedDict[Any, Any] = OrderedDict()
    pairs = _container(arguments)
    for key, value in pairs.items() if isinstance(pairs, dict) else pairs:
        if not isinstance(key, str | int | float | bytes):
            raise NotPickled(f"a key of a dict is a {type(key).__name__}")
        require_short(key)
        made[key] = value
    return made


def require_short(key: Any) -> None:
    """Check that a key can be shown and joined with others.

    Raises:
        NotPickled: it is a text of more than 10,000 characters.
    """
    if isinstance(key, str | bytes) and len(key) > LONGEST_KEY:
        raise NotPickled(f"a key of a dict or a member of a set has {len(key)} characters")


def _default_dict(arguments: tuple[Any, ...], call: Call) -> Any:
    return _dict(arguments[1:], call)


def _list(arguments: tuple[Any, ...], call: Call) -> Any:
    return list(_container(arguments))


def _container(arguments: tuple[Any, ...]) -> Any:
    """Return the first argument, which holds the items; `list` of a text would make an object of each letter."""
    given = arguments[0] if arguments else ()
    if not isinstance(given, list | tuple | dict | set | frozenset):
        raise NotPickled(f"a container is made of a {type(given).__name__}")
    return given


def _size(arguments: tuple[Any, ...], call: Call) -> Any:
    return _sizes(arguments[0])


def _device(arguments: tuple[Any, ...], call: Call) -> Any:
    if not all(isinstance(part, str | int) for part in arguments):
        raise NotPickled("a device is named by what is neither text nor number")
    return ":".join(str(part)[:40] for part in arguments[:2])


def _encode(arguments: tuple[Any, ...], call: Call) -> Any:
    """Return bytes, which protocol 2 writes as text."""
    if not isinstance(arguments[0], str):
        raise NotPickled(f"it encodes a {type(arguments[0]).__name__}")
    return arguments[0].encode("latin-1")


def _complex(arguments: tuple[Any, ...], call: Call) -> Any:
    return [float(part) for part in arguments[:2]]


def _numpy_dtype(arguments: tuple[Any, ...], call: Call) -> Any:
    code = arguments[0]
    if not isinstance(code, str) or len(code) != 2 or code[0] not in "fiub" or code[1] not in "1248":
        return Opaque("numpy.dtype", arguments)
    made = Opaque("numpy.dtype", arguments)
    made.value = numpy.dtype(code)
    made.receive = _numpy_byte_order
    return made


def _numpy_byte_order(made: Opaque, state: Any) -> None:
    if isinstance(state, tuple) and len(state) > 1 and state[1] == ">":
        made.value = made.value.newbyteorder(">")


def _numpy_scalar(arguments: tuple[Any, ...], call: Call) -> Any:
    kind, data = arguments
    if kind.value is None or len(data) != kind.value.itemsize:
        return Opaque("numpy.scalar", arguments)
    return numpy.frombuffer(data.encode("latin-1") if isinstance(data, str) else data, kind.value)[0].item()


def _numpy_array(arguments: tuple[Any, ...], call: Call) -> Any:
    """Return what stands for an array, empty until its state comes; it is carried as a tensor."""
    return Opaque("numpy.ndarray", (), receive=_numpy_fill)


def _numpy_from_buffer(arguments: tuple[Any, ...], call: Call) -> Any:
    data, kind, shape, order = arguments[:4]
    made = Opaque("numpy.ndarray", ())
    _numpy_fill(made, (1, shape, kind, order != "C", data))
    return made


def _numpy_fill(made: Opaque, state: Any) -> None:
    _, shape, kind, in_columns, data = state
    if not isinstance(data, str | bytes | bytearray):
        raise NotPickled(f"an array is made of a {type(data).__name__}")
    data = data.encode("latin-1") if isinstance(data, str) else bytes(data)
    if isinstance(kind, Opaque) and kind.value is not None and not in_columns:
        array = numpy.frombuffer(data, kind.value).reshape(_sizes(shape))
        made.value = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


BUILDERS: dict[str, Build] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch.nn.parameter.Parameter": _first,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.Size": _size,
    "torch.device": _device,
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    "collections.defaultdict": _default_dict,
    "collections.deque": _list,
    "_codecs.encode": _encode,
    **{
        f"{module}.{name}": build
        for module in ("builtins", "__builtin__")
        for name, build in (
            ("dict", _dict),
            ("list", _list),
            ("set", _list),
            ("frozenset", _list),
            ("complex", _complex),
        )
    },
    "builtins.bytearray": _first,
    "numpy.dtype": _numpy_dtype,
    **{
        f"{module}.{name}": build
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name, build in (("scalar", _numpy_scalar), ("_reconstruct", _numpy_array))
    },
    "numpy.core.numeric._frombuffer": _numpy_from_buffer,
    "numpy._core.numeric._frombuffer": _numpy_from_buffer,
}
