"""Record what the references of TransformerEngine and microxcaling make of the matrices: `record.py TE MICROXCALING`.

Both are checkouts: TransformerEngine d0067d0 (its references in plain torch, the rest of its package replaced by
stubs), microxcaling 7bc4195. The file next to this one holds figures only.
"""

import enum
import functools
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.training.precision.shared_scales.matrices import bell, make_matrices

KINDS = ("wide bf16", "outliers bf16", "fp32", "any fp32", "zeros")
OUT = Path(__file__).parent / "references.npz"


class _Quantizer:
    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _small(values: Tensor) -> Any:
    """Return values of e2m1 twice as large, as whole numbers."""
    return (2 * values.float()).to(torch.int8).numpy()


def transformer_engine(root: Path) -> dict[str, Any]:
    """Return what its references make of NVFP4 in rows, of transformed columns, in squares, and of blocks of 128."""
    package, folder = "transformer_engine.pytorch", root / "transformer_engine/pytorch/custom_recipes"
    stub = mock.MagicMock()
    utils = _load("reference_utils", folder / "reference_utils.py")
    gemm = SimpleNamespace(MMParams=object, GEMMType=enum.Enum("GEMMType", "FPROP DGRAD WGRAD"))
    sys.modules |= {
        "transformer_engine": stub,
        package: stub,
        "references": stub,
        f"{package}.custom_recipes": SimpleNamespace(gemm=gemm, reference_utils=utils),  # type: ignore[dict-item]
        f"{package}.quantized_tensor": SimpleNamespace(  # type: ignore[dict-item]
            QuantizedTensorStorage=object, Quantizer=_Quantizer
        ),
    }
    nvfp4 = _load("reference_nvfp4", folder / "reference_nvfp4.py")
    references = root / "tests/pytorch/references"
    _load("references.quantize_scale_calc", references / "quantize_scale_calc.py")
    blocks = _load("blocks", references / "blockwise_quantizer_reference.py").BlockwiseQuantizerReference()
    found: dict[str, Any] = {}
    e2m1 = utils.Fp4Formats.E2M1
    for kind, x in make_matrices(32, 64).items():
        if kind not in KINDS:
            continue
        x = x.bfloat16() if "bf16" in kind else x
        for what, rows in (("rows", 1), ("transformed", 1), ("squares", 16)):
            quantizer = nvfp4.NVFP4QuantizerRef(
                e2m1, quant_tile_shape=(rows, 16), with_rht=what == "transformed"
            )
            out = quantizer.quantize(x)
            for side, data, scale in (("", out.data, out.scale), (" columns", out.data_t, out.scale_t)):
                found[f"te nvfp4 {what}{side} {kind}"] = _small(nvfp4.cast_from_fp4x2(data, torch.float32))
                found[f"te nvfp4 {what}{side} {kind} scales"] = scale.float().numpy()
    x = make_matrices(128, 160)["fp32"]
    for shape in ("rows", "squares"):
        for scale in ("fp32", "pow2"):
            options = {"eps": 0.0, "pow_2_scales": scale == "pow2"}
            tile = (1 if shape == "rows" else 128, 128)
            out = blocks.quantize(x, torch.float8_e4m3fn, quant_tile_shape=tile, **options)
            found[f"te blocks {shape} {scale}"] = out.data.view(torch.uint8).numpy()
    quantizer = nvfp4.NVFP4QuantizerRef(e2m1)
    a, b = (quantizer.quantize(bell(rows, 64, salt).bfloat16()) for rows, salt in ((32, 50), (24, 70)))
    out = quantizer.qgemm(a.data, b.data, None, torch.bfloat16, a.scale, b.scale, qresult_x=a, qresult_w=b)
    found["te nvfp4 product"] = out.float().numpy()
    return found


def microxcaling(root: Path) -> dict[str, Any]:
    """Return what it makes of MXFP8 and MXFP4 with scales by `floor`: values, not elements."""
    sys.path.insert(0, str(root))
    module = importlib.import_module("mx.mx_ops")
    quantize = functools.partial(
        module._quantize_mx, round="even", axes=[-1], block_size=32, shared_exp_method="max"
    )
    found = {}
    for name in ("fp8_e4m3", "fp8_e5m2", "fp4_e2m1"):
        for kind, x in make_matrices(32, 64).items():
            if kind in KINDS[:2]:
                found[f"mx {name} {kind}"] = quantize(x, 8, name).bfloat16().view(torch.int16).numpy()
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    np.savez_compressed(OUT, **transformer_engine(Path(sys.argv[1])), **microxcaling(Path(sys.argv[2])))
