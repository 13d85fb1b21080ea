"""The casts of `torch.autocast` on a GPU, for tensors on a CPU: what each operation computes in, asked of torch itself.

On a CPU `torch.autocast` has lists of its own: softmax, norms, sums, exponentials and powers stay in 16 bits, 3D pools
and padding go to fp32, and `binary_cross_entropy` is computed where a GPU refuses it. While `cuda_casts` is on, blocks
of `torch.autocast("cpu")` cast as those for CUDA do.

Which operations have a cast is what torch's dispatcher has registered for CUDA. What the cast is follows from calling
that kernel on a tensor without memory whose device says CUDA: the types that reach the operation are seen, and nothing
is computed. An operation is asked about when it is first called. Nothing here names an operation, except those that a
GPU treats otherwise below autocast.

The casts are registered for the dispatch key of a device that torch does not have, so `torch.autocast` outside of
`cuda_casts` meets torch's own kernels. The key is on for a thread exactly where the state of autocast is.
"""

from __future__ import annotations

import _thread
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

SPARE = "AutocastIPU"
COMPOSED = "CompositeImplicitAutograd"
MAX_KEYS = 64  # so many kinds of calls of one function are known
AS_IT_IS: AbstractContextManager[None] = nullcontext()
TO_COPY = torch.ops.aten._to_copy.default  # what a cast of a tensor is below autocast
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
# cuDNN computes whole layers, and torch casts what it gets to the 16-bit type. These operations are such a layer.
RECURRENT = ("lstm.input", "lstm.data", "gru.input", "gru.data", "rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input",
             "rnn_relu.data")  # fmt: skip
# One kernel of CUDA computes a whole list of tensors; those of a CPU call an operation for each, which would be cast.
OF_LISTS = "aten::_foreach_"
# These know 16 bits on a GPU alone. `stft` multiplies by its window before, which rounds.
TRANSFORMS = ("aten::_fft_r2c", "aten::_fft_c2r", "aten::_fft_c2c")
BY_PARTS = ("stft",)
# Overloads of torch before 2.13, which Python cannot call by their schema.
NAMED_DIMENSIONS = ("imname", "DimnameList", "names_ScalarOpt_dim")
# Kernels of CUDA refuse 16-bit types here as those of a CPU do, which no tensor without memory shows: no LAPACK has
# them, and neither has `ctc_loss`. `index_copy` wants one type, `cat` and `stack` promote by themselves, and a padded
# convolution is one of the products.
AS_ON_CPU = ("cholesky", "geqrf", "inverse", "linalg_", "lu_", "_lu_", "orgqr", "ormqr", "pinverse", "qr", "svd",
             "triangular_solve", "ctc_loss", "index_copy", "cat", "stack", "conv")  # fmt: skip
_SAMPLES: dict[str, Any] = {
    "str": "ij,jk->ik", "int": 1, "SymInt": 1, "float": 1.0, "number": 1.0, "bool": False,
}  # fmt: skip


class CastKind(Enum):
    """What autocast does with the tensors that an operation gets."""

    LOWER = "in the 16-bit type"
    FP32 = "in fp32"
    WIDEST = "in the widest type of its inputs"
    REFUSED = "refused"
    NONE = "not cast"


_Call = tuple[Any, tuple[torch.dtype, ...]]  # an operation below autocast, and the types of what it gets


@dataclass(frozen=True)
class _TensorShape:
    """A tensor to be made without memory, where no mode of the caller, as of a compiler that traces, changes it."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    def make_tensor(self) -> Tensor:
        return torch.empty(self.sizes, dtype=self.dtype, device=_META)


@dataclass(frozen=True)
class _ObservedCall:
    """What was seen of a call: the types of its results, the casts in it, the error if any, and all that it calls."""

    results: tuple[torch.dtype, ...]
    casts: tuple[torch.dtype, ...]
    error: BaseException | None
    calls: tuple[_Call, ...]

    def result_type(self) -> torch.dtype | None:
        """Return the type in which the operation is computed, where that is seen."""
        floating = [one for one in self.results if one.is_floating_point or one.is_complex]
        return next(iter(floating), None) or (self.casts[-1] if self.casts else None)


class _TensorWithoutMemory(Tensor):
    """A tensor without memory that claims to be on a device, so that autocast for that device casts it."""

    meta: Tensor
    calls: list[_Call]

    @staticmethod
    def __new__(cls, meta: Tensor, device: str, calls: list[_Call]) -> _TensorWithoutMemory:
        made: _TensorWithoutMemory = torch.Tensor._make_wrapper_subclass(
            cls, meta.size(), strides=meta.stride(), dtype=meta.dtype, device=torch.device(device)
        )
        made.meta, made.calls = meta, calls
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub has no place for the function
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        own = next(one for one in leaves if isinstance(one, _TensorWithoutMemory))
        given = [one.dtype if isinstance(one, Tensor) else one for one in leaves]
        own.calls.append((func, tuple(one for one in given if isinstance(one, torch.dtype))))

        def without(value: Any) -> Any:
            if isinstance(value, _TensorWithoutMemory):
                return value.meta
            return _META if _is_device_object(value) else value

        result = func(*pytree.tree_map(without, args), **pytree.tree_map(without, kwargs))
        device = own.device.type
        return pytree.tree_map(
            lambda one: _TensorWithoutMemory(one, device, own.calls) if isinstance(one, Tensor) else one,
            result,
        )


_META = torch.device("meta")


def _is_device_object(value: Any) -> bool:
    return isinstance(value, torch.device)


# Asking torch.


def find_operation(name: str) -> Any:
    """Return the operation of a name such as `aten::sum.dim_IntList`; None if Python cannot call it."""
    namespace, _, rest = name.partition("::")
    packet, _, which = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), which or "default", None)


def operations_with_autocast_kernel(device: str) -> set[str]:
    """Return the names of all operations that autocast for "CUDA" or "CPU" has a kernel for."""
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device}"))


def _call_in_new_thread(function: Callable[[], Any]) -> Any:
    """Call a function where no mode, transform or autocast of the caller is on.

    The thread is none of `threading`: a script may have replaced `Thread.run` by what opens autocast, which would ask
    again without end.
    """
    box: list[Any] = []
    done = _thread.allocate_lock()

    def call_and_keep_result() -> None:
        try:
            box.append(function())
        finally:
            done.release()

    done.acquire()
    _thread.start_new_thread(call_and_keep_result, ())
    with done:
        return box[0]


def _observe_call(
    device: str, dtype: torch.dtype | None, function: Any, args: Any, kwargs: Any, *, with_casts: bool = False
) -> _ObservedCall:
    """Call an operation on tensors without memory, under autocast for a device unless `dtype` is None.

    Args:
        args, kwargs: of the operation, with a `_TensorShape` in the place of each tensor.
        with_casts: cast here, as on CUDA, what torch does not cast so for the device.
    """

    def call_under_autocast() -> _ObservedCall:
        calls: list[_Call] = []
        result, error = None, None

        def without_memory(value: Any) -> Any:
            if not isinstance(value, _TensorShape):
                return value
            return _TensorWithoutMemory(value.make_tensor(), device, calls)

        fake_args, fake_kwargs = pytree.tree_map(without_memory, (args, kwargs))
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if dtype is not None:
                    torch._C.set_autocast_dtype(device, dtype)
                    torch._C.set_autocast_enabled(device, True)
                    switch_cuda_casts(with_casts)
                try:
                    result = function(*fake_args, **fake_kwargs)
                finally:
                    torch._C.set_autocast_enabled(device, False)
                    switch_cuda_casts(False)
        except Exception as raised:  # of any kind: what torch says is the answer
            error = raised.with_traceback(None)
            error.__context__ = None
        results = tuple(one.dtype for one in pytree.tree_leaves(result) if isinstance(one, Tensor))
        casts = tuple(types[1] for func, types in calls if func is TO_COPY and len(types) > 1)
        return _ObservedCall(results, casts, error, tuple(calls))

    return _call_in_new_thread(call_under_autocast)  # type: ignore[no-any-return]


def _sample_args_and_kwargs(
    function: Any, types: Sequence[torch.dtype]
) -> tuple[list[Any], dict[str, Any]] | None:
    """Return arguments of an operation by its schema, a `_TensorShape` of each type in turn; None for unknown kinds.

    Casts come first, so that the shapes need not fit one another.
    """
    left = list(types)

    def make_sample_tensor() -> _TensorShape:
        return _TensorShape((3, 3), left.pop(0) if len(left) > 1 else left[0])

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in function._schema.arguments:
        kind = str(argument.type)
        is_optional = kind.startswith("Optional")
        if argument.has_default_value() or (is_optional and "Tensor" not in kind):
            value = argument.default_value if argument.has_default_value() else None
        elif kind in ("Tensor", "Optional[Tensor]"):
            value = None if is_optional else make_sample_tensor()
        elif kind == "List[Tensor]":
            value = [make_sample_tensor(), make_sample_tensor()]
        elif kind == "List[Optional[Tensor]]":
            value = [_TensorShape((3,), torch.long)]
        elif kind.startswith("List["):
            value = [1] * (argument.N or 1) if "int" in kind.lower() else [False] * (argument.N or 1)
        elif kind in _SAMPLES:
            value = _SAMPLES[kind]
        else:
            return None
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def cast_of_operation(name: str, device: str = "cuda") -> CastKind:
    """Return what autocast for a device does with an operation.

    Args:
        name: of the operation and its overload in torch's dispatcher, such as "aten::mm".
        device: "cuda" or "cpu"; a GPU need not be there.

    Returns:
        `Cast.NONE` where autocast has no kernel for it, or where no call of it could be tried.
    """
    function = find_operation(name)
    if function is None or name not in operations_with_autocast_kernel(device.upper()):
        return CastKind.NONE
    half, full = torch.float16, torch.float32
    seen = []
    for types in ([half], [full], [half, full]):
        sample = _sample_args_and_kwargs(function, types)
        if sample is None:
            return CastKind.NONE
        seen.append(_observe_call(device, half, function, *sample))
    of_half, of_full, of_both = (each.result_type() for each in seen)
    if of_full is half:
        return CastKind.LOWER
    if of_half is full:
        return CastKind.FP32
    if not any(each.casts or each.results for each in seen):
        sample = _sample_args_and_kwargs(function, [full])
        assert sample is not None
        return (
            CastKind.REFUSED
            if _observe_call(device, None, function, *sample).error is None
            else CastKind.NONE
        )
    return CastKind.WIDEST if seen[2].casts or of_both is full else CastKind.NONE


# Casting on a CPU.

_KEY = getattr(torch._C.DispatchKey, SPARE)
_ONLY_KEY = torch._C.DispatchKeySet(_KEY)
_KEYS = _ONLY_KEY | torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_without = torch._C._ExcludeDispatchKeyGuard
_include = torch._C._dispatch_tls_set_dispatch_key_included
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded
# Those of torch itself: scripts and arms replace what `torch` shows.
_is_enabled, _type_now = torch._C.is_autocast_enabled, torch._C.get_autocast_dtype
_Rule = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def _cast_arguments(values: Any, cast: Callable[[Tensor], Tensor]) -> Iterator[Any]:
    """Yield arguments with the floating-point tensors cast that autocast casts: not those in float64."""
    for each in values:
        if isinstance(each, Tensor):
            yield cast(each) if each.is_floating_point() and each.dtype is not torch.float64 else each
        elif isinstance(each, (list, tuple)):
            yield type(each)(_cast_arguments(each, cast))
        else:
            yield each


def _call_with_cast_arguments(
    function: Any, args: Any, kwargs: dict[str, Any], cast: Callable[[Tensor], Tensor]
) -> Any:
    """Return what an operation computes of arguments that are cast, with autocast off inside."""
    args = [*_cast_arguments(args, cast)]
    if kwargs:
        kwargs = dict(zip(kwargs, _cast_arguments(kwargs.values(), cast), strict=True))
    with _without(_KEYS):
        return function(*args, **kwargs)


def _call_without_casts(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    with _without(_KEYS):
        return function(*args, **kwargs)


def _is_result_type_named(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call says in which type it is to be computed."""
    return torch.dtype in map(type, args) or (bool(kwargs) and kwargs.get("dtype") is not None)


def _to_fp32(one: Tensor) -> Tensor:
    return one if one.dtype is torch.float32 else one.float()


def _fp32_rule(function: Any) -> _Rule:
    def call_in_fp32(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _is_result_type_named(args, kwargs):
            return _call_without_casts(function, args, kwargs)
        return _call_with_cast_arguments(function, args, kwargs, _to_fp32)

    return call_in_fp32


def _lower_type_rule(function: Any, *, uses_cache: bool = True) -> _Rule:
    def call_in_autocast_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = _type_now("cpu")
        return _call_with_cast_arguments(
            function,
            args,
            kwargs,
            lambda one: _cast_tensor_by_cache(one, dtype) if uses_cache else one.to(dtype),
        )

    return call_in_autocast_type


def _widest_type_rule(function: Any, *, must_round: bool = False) -> _Rule:
    def call_in_widest_type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lower = _type_now("cpu")
        types = {one.dtype for one in _tensors_among_arguments((args, kwargs)) if one.is_floating_point()} - {
            torch.float64
        }
        if types - {torch.float32, lower}:  # the 16-bit type that autocast is not in
            _refuse_as_on_gpu(function, lower, args, kwargs)
        dtype = torch.float32 if torch.float32 in types else lower
        if (
            must_round
            and dtype is not torch.float32
            and torch.float64 not in {one.dtype for one in _tensors_among_arguments((args, kwargs))}
        ):
            return _call_in_fp32_and_round(
                function, tuple(_cast_arguments(args, lambda one: one.to(dtype))), kwargs, [dtype]
            )
        return _call_with_cast_arguments(function, args, kwargs, lambda one: one.to(dtype))

    return call_in_widest_type


def _rule_that_refuses_as_gpu(function: Any) -> _Rule:
    def refuse_or_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _refuse_as_on_gpu(function, _type_now("cpu"), args, kwargs)
        return _call_without_casts(function, args, kwargs)

    return refuse_or_call


def _refuse_as_on_gpu(function: Any, lower: torch.dtype, args: Any, kwargs: Any) -> None:
    """Raise what torch raises for such arguments on a GPU, if it does."""
    error = _observe_call("cuda", lower, function, *_replace_tensors_by_shapes((args, kwargs))).error
    if error is not None:
        raise error


def _tensors_among_arguments(values: Any) -> list[Tensor]:
    args, kwargs = values
    # nearly always, and far cheaper
    if not kwargs and not any(isinstance(one, (list, tuple)) for one in args):
        return [one for one in args if isinstance(one, Tensor)]
    return [one for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]


def _replace_tensors_by_shapes(values: Any, *, widen: bool = False) -> Any:
    """Return arguments with a `_TensorShape` in the place of each tensor, 16-bit ones widened to 32 if asked."""

    def shape(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        sizes = tuple(size if isinstance(size, int) else size.node.hint for size in one.shape)
        return _TensorShape(sizes, WIDE.get(one.dtype, one.dtype) if widen else one.dtype)

    return pytree.tree_map(shape, values)


def _is_plain_tensor(one: Tensor) -> bool:
    """Return whether a tensor is of torch's own classes, with memory of its own and none of torch.func around it."""
    if type(one) not in (Tensor, torch.nn.Parameter):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(one) and not one._is_view()


def _cast_tensor_by_cache(one: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the type of autocast, a weight by the cache that torch's own casts fill and clear.

    A weight that two operations of a block use has one copy, in which its gradients meet. Nothing returns that copy,
    but a product keeps it for its backward pass; this product has no columns.
    """
    is_weight = one.dtype is torch.float32 and one.requires_grad and one.is_leaf and one.dim() > 0
    if not (is_weight and torch.is_autocast_cache_enabled() and _is_plain_tensor(one)):
        return one.to(dtype)
    with _without(_ONLY_KEY), torch.autograd.graph.saved_tensors_hooks(_return_as_it_is, _return_as_it_is):
        product = torch.matmul(one, torch.empty(one.shape[-1], 0, dtype=dtype, requires_grad=True))
        node = product.grad_fn
        while node is not None:
            saved = getattr(node, "_saved_self", None)
            if isinstance(saved, Tensor) and saved.numel() == one.numel() and saved.dtype is dtype:
                return saved.reshape(one.shape)
            node = node.next_functions[0][0] if node.next_functions else None
    return one.to(dtype)  # without a graph there is nothing to keep


def _return_as_it_is(value: Tensor) -> Tensor:
    return value


def _rule_of_operation_cast_on_cpu_alone(name: str, function: Any) -> _Rule:
    """Return the rule of an operation that the CPU casts and CUDA does not: in fp32, each result rounded once.

    Not every kernel of a CPU knows 16-bit types, or adds in fp32. What a function is composed of may have casts of its
    own; then it is computed by its parts, as on CUDA.
    """
    is_composed = torch._C._dispatch_has_kernel_for_dispatch_key(name, COMPOSED)
    is_plain = _is_view_operation(function) or name.partition("::")[2].startswith((*AS_ON_CPU, *BY_PARTS))
    plans: dict[Any, tuple[torch.dtype, ...] | None] = {}
    compose = functools.partial(function._op_dk, getattr(torch._C.DispatchKey, COMPOSED))
    are_alike: dict[Any, bool] = {}

    def call_in_fp32_and_round(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lower = _type_now("cpu")
        key, is_alike = None, None
        if is_composed and not kwargs:
            key = (lower, *[(one.dtype, one.ndim) if isinstance(one, Tensor) else one for one in args])
            try:
                is_alike = are_alike.get(key)
            except TypeError:  # a list is no key
                key = None
            if is_alike:
                with _without(_ONLY_KEY):
                    return compose(*args)
        results = None
        if not is_plain:
            types = tuple(one.dtype for one in _tensors_among_arguments((args, kwargs)))
            if not WIDE.keys().isdisjoint(types):
                if (lower, *types) not in plans:
                    plans[lower, *types] = _result_types_on_cuda(function, lower, args, kwargs)
                results = plans[lower, *types]
        if results is not None:
            return _call_in_fp32_and_round(function, args, kwargs, results)
        if not is_composed:
            return _call_without_casts(function, args, kwargs)
        if key is not None and is_alike is None and len(are_alike) < MAX_KEYS:
            are_alike[key] = _are_casts_of_parts_alike(compose, lower, args)
        return compose(*args, **kwargs)

    return call_in_fp32_and_round


def _are_casts_of_parts_alike(compose: Callable[..., Any], lower: torch.dtype, args: tuple[Any, ...]) -> bool:
    """Return whether torch's own casts for the CPU, of the parts of a function, are those for CUDA."""
    shapes, _ = _replace_tensors_by_shapes((args, {}))
    cast, left = (_observe_call("cpu", lower, compose, shapes, {}, with_casts=on) for on in (True, False))
    return cast.error is left.error is None and cast.calls == left.calls


def _call_in_fp32_and_round(
    function: Any, args: Any, kwargs: dict[str, Any], types: Sequence[torch.dtype]
) -> Any:
    """Return the results of an operation in 32 bits, rounded to types in turn."""
    with _without(_KEYS):
        results = function(*pytree.tree_map(_widen_to_fp32, args), **pytree.tree_map(_widen_to_fp32, kwargs))
    if isinstance(results, Tensor):
        return results.to(types[0])
    leaves, spec = pytree.tree_flatten(results)
    left = iter(types)
    return pytree.tree_unflatten(
        [one.to(next(left)) if isinstance(one, Tensor) else one for one in leaves], spec
    )


def _widen_to_fp32(one: Any) -> Any:
    return one.to(WIDE[one.dtype]) if isinstance(one, Tensor) and one.dtype in WIDE else one


def _is_view_operation(function: Any) -> bool:
    """Return whether a result shares the memory of an argument."""
    return any(one.alias_info is not None for one in function._schema.returns)


def _result_types_on_cuda(
    function: Any, lower: torch.dtype, args: Any, kwargs: Any
) -> tuple[torch.dtype, ...] | None:
    """Return the types of an operation's results on a GPU; None where a part of it is cast, or they are not shown.

    Raises:
        RuntimeError: torch refuses 16-bit types there.
    """
    shapes = _replace_tensors_by_shapes((args, kwargs))
    seen = _observe_call("cuda", lower, function, *shapes)
    if seen.error is None:
        # A function may convert by itself: numbers to complex ones.
        is_cast = bool(seen.casts) and seen.calls != _observe_call("cuda", None, function, *shapes).calls
        return None if is_cast else seen.results
    if (
        _observe_call("cuda", lower, function, *_replace_tensors_by_shapes((args, kwargs), widen=True)).error
        is None
    ):
        raise seen.error
    return None


def _fused_rms_norm_rule(function: Any) -> _Rule:
    """Return the rule before it has a cast: the fused kernel of CUDA rounds to the type of the input."""

    def call_in_fp32_and_round_back(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _call_with_cast_arguments(function, args, kwargs, Tensor.float).to(args[0].dtype)

    return call_in_fp32_and_round_back


_RULES = {
    CastKind.FP32: _fp32_rule,
    CastKind.LOWER: _lower_type_rule,
    CastKind.WIDEST: _widest_type_rule,
    CastKind.REFUSED: _rule_that_refuses_as_gpu,
}


def _cast_rule_of_operation(name: str, function: Any) -> _Rule | None:
    """Return how an operation is cast; None where torch's own kernel for the CPU casts it so."""
    if name.removeprefix("aten::") in RECURRENT:
        return _lower_type_rule(function, uses_cache=False)
    if name == "aten::rms_norm" and name not in operations_with_autocast_kernel("CUDA"):
        return _fused_rms_norm_rule(function)
    if name.startswith(OF_LISTS):
        return functools.partial(_call_without_casts, function)
    if name not in operations_with_autocast_kernel("CUDA"):
        return _rule_of_operation_cast_on_cpu_alone(name, function)
    cast = cast_of_operation(name)
    if name in operations_with_autocast_kernel("CPU"):
        of_cpu = cast_of_operation(name, "cpu")
        if cast is of_cpu:
            return None
        if cast is CastKind.WIDEST and of_cpu is CastKind.FP32:
            return _widest_type_rule(function, must_round=True)
    return _RULES[cast](function) if cast in _RULES else _rule_of_operation_cast_on_cpu_alone(name, function)


def _make_cuda_cast_kernel(name: str, function: Any) -> Callable[..., Any]:
    rule: _Rule | None = None

    def call_by_rule(*args: Any, **kwargs: Any) -> Any:
        nonlocal rule
        if rule is None:
            rule = _cast_rule_of_operation(name, function)
            if rule is None:
                _leave_operation_to_torch(name)
                rule = functools.partial(_call_torchs_kernel, function)
        # inside of an operation that is cast, or of a block that switches autocast off
        if not _is_enabled("cpu"):
            return _call_without_casts(function, args, kwargs)
        return rule(args, kwargs)

    return call_by_rule


def _call_torchs_kernel(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _without(_ONLY_KEY):
        return function(*args, **kwargs)


def _leave_operation_to_torch(name: str) -> None:
    """Let calls of an operation pass by without a detour through Python, where this torch can replace a kernel."""
    # torch 2.6 refuses that: there the kernel in Python calls torch's own, which costs time alone.
    with warnings.catch_warnings(), suppress(RuntimeError):
        warnings.simplefilter("ignore")  # that a kernel is replaced
        _library_for_operation(name).impl(name.partition("::")[2], torch.library.fallthrough_kernel, SPARE)


_libraries: dict[str, torch.library.Library] = {}  # torch forgets the kernels of one that is gone
_lock = threading.RLock()


def _library_for_operation(name: str) -> torch.library.Library:
    namespace = name.partition("::")[0]
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    return _libraries[namespace]


_known: set[str] = set()
_seen_modules = 0


def install_cuda_casts() -> None:
    """Register the casts, for the life of this process; nothing reaches them until the key is on for a thread."""
    global _seen_modules
    with _lock:
        if _seen_modules == (_seen_modules := len(sys.modules) + len(torch.ops.loaded_libraries)):
            return  # what defines operations is imported or loaded
        if not _known:
            _library_for_operation("_").fallback(torch.library.fallthrough_kernel, SPARE)
        names = operations_with_autocast_kernel("CUDA") | operations_with_autocast_kernel("CPU")
        names |= {f"aten::{name}" for name in RECURRENT} | set(TRANSFORMS)
        names |= {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(OF_LISTS)}
        if find_operation("aten::_fused_rms_norm") is not None:
            names.add("aten::rms_norm")
        for name in sorted(names - _known):
            function = find_operation(name)
            if function is not None and not name.endswith(NAMED_DIMENSIONS):
                _library_for_operation(name).impl(
                    name.partition("::")[2], _make_cuda_cast_kernel(name, function), SPARE
                )
        _known.update(names)


def switch_cuda_casts(on: bool) -> None:
    """Cast on this thread as for CUDA, or no longer; autocast for the CPU must be in the same state."""
    _include(_KEY, on)
    _exclude(_KEY, not on)


class _NumOpenAutocastBlocks(threading.local):
    count = 0  # of blocks of this thread that are entered


class _AutocastFollower:
    """Switches the casts with the state of autocast for the CPU, in some threads of this process or in all of them."""

    def __init__(self) -> None:
        self._blocks = self._everywhere = 0
        self._here = _NumOpenAutocastBlocks()
        self._setter: Any = None

    def is_on_in_this_thread(self) -> bool:
        return bool(self._everywhere or self._here.count)

    def begin_following(self, everywhere: bool) -> None:
        install_cuda_casts()
        with _lock:
            if not self._blocks:
                self._setter = torch.set_autocast_enabled
                torch.set_autocast_enabled = self._set_autocast_enabled  # type: ignore[assignment]
            self._blocks += 1
            self._everywhere += everywhere
        self._here.count += 1

    def end_following(self, everywhere: bool) -> None:
        self._here.count -= 1
        with _lock:
            self._blocks -= 1
            self._everywhere -= everywhere
            if not self._blocks:
                torch.set_autocast_enabled = self._setter
        if not self.is_on_in_this_thread():
            switch_cuda_casts(False)

    def _set_autocast_enabled(self, *args: Any) -> None:
        self._setter(*args)
        if args[0] == "cpu" and (self._everywhere or self._here.count):
            switch_cuda_casts(bool(args[1]))


_follower = _AutocastFollower()


class cuda_casts(AbstractContextManager[None]):  # a context, such as torch.autocast
    """Let blocks of `torch.autocast("cpu")` that are entered inside cast as those for CUDA do.

    Args:
        everywhere: in all threads, not in this one alone.
    """

    def __init__(self, *, everywhere: bool = False) -> None:
        self._everywhere = everywhere

    def __enter__(self) -> None:
        _follower.begin_following(self._everywhere)

    def __exit__(self, *exception: object) -> None:
        _follower.end_following(self._everywhere)


def is_casting_as_on_cuda() -> bool:
    """Return whether blocks of autocast for the CPU that this thread enters cast as those for CUDA do."""
    return _follower.is_on_in_this_thread()


def cast_as_on_cuda(device_type: str, cast_lists: str) -> AbstractContextManager[None]:
    """Return a context in which autocast casts as on CUDA.

    Args:
        device_type: of the block, such as "cpu"; on another device nothing changes.
        cast_lists: "cuda"; "cpu" leaves autocast on a CPU its own lists.
    """
    return (
        AS_IT_IS if device_type != "cpu" or cast_lists != "cuda" or is_casting_as_on_cuda() else cuda_casts()
    )


class TwoNestedContexts(AbstractContextManager[Any]):
    """Two contexts, one inside of the other; returns what the inner one returns.

    It may be entered as often as both contexts may.

    Args:
        outer: entered first and left last, also where entering `inner` fails.
        inner: may suppress an exception, which `outer` still sees.
    """

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> Any:
        self._outer.__enter__()
        try:
            return self._inner.__enter__()
        except BaseException:
            self._outer.__exit__(None, None, None)
            raise

    def __exit__(self, *exception: Any) -> bool | None:
        try:
            return self._inner.__exit__(*exception)
        finally:
            self._outer.__exit__(*exception)
