"""Questions that `doctor` asks in a child process, so that a crash, a hang or a broken package is an answer.

Each is a function that imports what it asks about inside, and returns plain data. Nothing else is imported: the
child may see other packages than this process.
"""

import contextlib
import importlib
from typing import Any

SURFACE = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")


def torch_build() -> dict[str, Any]:
    """Import torch and return versions, abilities and switches."""
    torch = importlib.import_module("torch")
    bf16 = importlib.import_module("ampcompare.training.precision.cpu_half")
    tf32 = importlib.import_module("ampcompare.base.tensors.tf32")
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "bf16_instructions": bf16.has_bf16_instructions(),
        "tf32_products": tf32.Tf32Switches.read().products == "tf32",
        "tf32_convolutions": tf32.Tf32Switches.read().convolutions == "tf32",
    }


def gpus() -> dict[str, Any]:
    """Start CUDA (or ROCm) and return each GPU, and whether an fp16 product on it is right."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return {"available": False, "devices": []}
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        device: dict[str, Any] = {
            "index": index,
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "total_bytes": properties.total_memory,
            "free_bytes": None,
            "failure": _why_fp16_product_fails(torch, f"cuda:{index}"),
        }
        if not device["failure"]:
            device["free_bytes"] = torch.cuda.mem_get_info(index)[0]
        devices.append(device)
    return {"available": True, "devices": devices}


def accelerators(kinds: list[str]) -> dict[str, Any]:
    """Return the accelerators of these types that torch sees, and whether an fp16 product on each is right."""
    torch = importlib.import_module("torch")
    found: list[dict[str, Any]] = []
    for kind in kinds:
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            continue
        for index in range(module.device_count()):
            name = f"{kind}:{index}"
            found.append({"name": name, "failure": _why_fp16_product_fails(torch, name)})
    return {"devices": found}


def _why_fp16_product_fails(torch: Any, device: str) -> str | None:
    """Return why a small fp16 product fails on a device; None where it is right."""
    try:
        ones = torch.ones(16, 16, device=device, dtype=torch.float16)
        return None if (ones @ ones).sum().item() == 16**3 else "an fp16 product of ones came out wrong"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def apex_amp_import() -> dict[str, Any]:
    """Import `apex.amp` and return the names that it lacks."""
    amp = importlib.import_module("apex.amp")
    return {"lacks": [name for name in SURFACE if not hasattr(amp, name)]}


def apex_kernels() -> dict[str, Any]:
    """Import `amp_C`, after torch, whose libraries it may need."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
    return {"file": getattr(importlib.import_module("amp_C"), "__file__", None)}


def torchvision_import() -> dict[str, Any]:
    """Import torchvision; if its operators are missing, import it again in the way that ampcompare does."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        importlib.import_module("ampcompare.tasks.torchvision_loader").load_torchvision()
    return {}


def entry_point_import(value: str) -> dict[str, Any]:
    """Import `module:attribute`."""
    module, _, attribute = value.partition(":")
    getattr(importlib.import_module(module), attribute)
    return {"value": value}
