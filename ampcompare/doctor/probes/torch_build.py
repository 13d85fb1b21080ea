"""How torch was built and what it sees of the CPU; CUDA is not initialized."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["torch_build"]


def torch_build() -> dict[str, Any]:
    """Import torch and return versions, abilities and switches; None for what this torch lacks."""
    torch = importlib.import_module("torch")
    bf16 = importlib.import_module("ampcompare.precision.cpu_half")

    def ask_torch(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except Exception:  # attributes and operators differ from version to version
            return None

    mkldnn = torch.ops.mkldnn
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": ask_torch(lambda: torch.backends.cudnn.version()),
        "capability": ask_torch(lambda: torch.backends.cpu.get_cpu_capability()),
        "fp16_products": ask_torch(lambda: bool(mkldnn._is_mkldnn_fp16_supported())),
        "bf16_products": ask_torch(lambda: bool(mkldnn._is_mkldnn_bf16_supported())),
        "bf16_instructions": ask_torch(bf16.has_bf16_instructions),
        "threads": torch.get_num_threads(),
        "distributed": ask_torch(lambda: bool(torch.distributed.is_available())),
        "nccl": ask_torch(lambda: bool(torch.distributed.is_nccl_available())),
        "gloo": ask_torch(lambda: bool(torch.distributed.is_gloo_available())),
        "mpi": ask_torch(lambda: bool(torch.distributed.is_mpi_available())),
        "tf32_products": ask_torch(lambda: bool(torch.backends.cuda.matmul.allow_tf32)),
        "tf32_convolutions": ask_torch(lambda: bool(torch.backends.cudnn.allow_tf32)),
    }
