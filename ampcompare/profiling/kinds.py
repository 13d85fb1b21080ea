"""Which kind of work an operation or a kernel is, by its name. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ampcompare.records.profile import WorkKind

__all__ = ["SHORT", "SYNC_CALLS", "TYPES", "is_half", "kind_of", "kind_of_kernel", "type_of"]

TYPES = {  # as a trace writes them
    "float": "fp32",
    "double": "fp64",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
SHORT = {"float32": "fp32", "float64": "fp64", "float16": "fp16", "bfloat16": "bf16"}
PRODUCTS = re.compile(
    r"^(mm|bmm|addmm|baddbmm|addbmm|mv|addmv|dot|_?convolution|.*_conv\w*|conv\w*|.*convolution\w*|linear|matmul|"
    r"_scaled_mm|_scaled_dot_product\w*|.*flash_attention\w*|.*efficient_attention\w*|einsum|_addmm_activation|"
    r"mkldnn_linear\w*|lstm\w*|gru\w*|mkldnn_rnn\w*)$"
)
NORMS = re.compile(r".*(norm|softmax)(?!.*foreach).*")
COPIES = re.compile(
    r"^(copy_?|clone|contiguous|fill_|zero_|zeros\w*|ones\w*|full\w*|empty\w*|cat|stack|_foreach_zero_|"
    r"_foreach_copy_|resize\w*|pin_memory|_pin_memory|new_\w+|index_select|gather|_pad\w*|constant_pad_nd)$"
)
SYNCS = ("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "_assert_async")
SYNC_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize")
CASTS = ("_to_copy", "to", "float", "half", "bfloat16", "type_as", "_autocast_to_full_precision")
COMMUNICATION = re.compile(r"^(c10d::|gloo:|nccl:|_c10d_functional|record_param_comms|.*(all_?reduce|all_?gather))")
VIEWS = re.compile(
    r"^(view|reshape|t|transpose|permute|expand|as_strided|detach|slice|select|unsqueeze|squeeze|alias)$"
)


def type_of(names: Sequence[object]) -> str:
    """Return the floating-point type of the inputs of an operation in a trace, the narrowest first; "" if none."""
    found = {TYPES[name] for name in names if isinstance(name, str) and name in TYPES}
    return next((name for name in ("fp8", "fp16", "bf16", "fp32", "fp64") if name in found), "")


def is_half(dtype: str) -> bool:
    """Return whether a type has 16 bits or fewer."""
    return dtype in ("fp16", "bf16", "fp8")


def kind_of(name: str) -> WorkKind:
    """Return the kind of an operation such as aten::addmm or gloo:all_reduce."""
    if COMMUNICATION.match(name):
        return "communication"
    bare = name.rpartition("::")[2].removesuffix("_backward").removesuffix("_forward")
    if bare in CASTS:
        return "cast"
    if bare in SYNCS:
        return "sync"
    if PRODUCTS.match(bare):
        return "product"
    if NORMS.match(bare) and not bare.startswith(("_foreach_norm", "linalg")):
        return "normalization"
    if COPIES.match(bare):
        return "copy"
    if VIEWS.match(bare):
        return "other"
    return "pointwise" if name.startswith(("aten::", "torch::")) else "other"


def kind_of_kernel(kernel: str, operation: str) -> WorkKind:
    """Return the kind of a kernel on a GPU, from its name and the operation that launched it."""
    text = kernel.lower()
    if "nccl" in text or "rccl" in text:
        return "communication"
    if any(word in text for word in ("gemm", "cutlass", "cudnn::cnn", "winograd", "implicit_conv", "fmha", "flash")):
        return "product"
    kind = kind_of(operation) if operation else "other"
    return "pointwise" if kind == "sync" else kind
