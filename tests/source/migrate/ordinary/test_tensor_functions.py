"""All methods of tensors and functions of torch that a rewritten network may call, under O1 and under autocast."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ampcompare.apex import amp
from ampcompare.base.tensors.cuda_casts import cuda_casts
from ampcompare.source.migrate.core.casts import FUNCTIONAL, PLAIN
from ampcompare.source.migrate.ordinary.words import (
    FORBIDDEN,
    FUNCTIONS,
    INTO,
    OF_FUNCTIONAL,
    name_unfit_for_network,
)
from ampcompare.source.migrate.read.wide_tensors import IN_PLACE
from ampcompare.source.module import Module

# What leaves the tensor, draws numbers, changes its memory, or needs what is not drawn here.
LEFT_OUT = frozenset({
    "apply_", "backward", "bernoulli", "bernoulli_", "bfloat16", "cauchy_", "const_data_ptr", "cpu", "cuda", "data_ptr",
    "dequantize", "detach_", "double", "dropout", "empty_like", "exponential_", "geometric_", "get_device", "half",
    "hpu", "ipu", "item", "log_normal_", "map2_", "map_", "module_load", "mtia", "multinomial", "new", "new_empty",
    "new_empty_strided", "normal_", "numpy", "pin_memory", "random_", "record_stream", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "resize", "resize_", "resize_as", "resize_as_", "set_",
    "share_memory_", "storage", "to", "tolist", "type", "uniform_", "untyped_storage", "xpu",
})  # fmt: skip
DRAWING = frozenset({"dropout", "dropout2d", "empty", "rand", "randint", "randn", "randperm"})
OTHER_KINDS = ("sparse", "quant", "fft", "stft", "complex", "svd", "eig", "mkldnn")
# Arguments behind the tensor, of a tensor and a matrix of its shape in fp32.
FORMS: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
    "none": lambda x, wide: (),
    "1": lambda x, wide: (1,),
    "2.0": lambda x, wide: (2.0,),
    "itself": lambda x, wide: (x,),
    "fp32": lambda x, wide: (wide,),
    "both": lambda x, wide: (x, wide),
    "fp32 twice": lambda x, wide: (wide, wide),
    "row": lambda x, wide: (wide[0],),
    "shape": lambda x, wide: (4, 4),
    "shape of rows": lambda x, wide: ((4,),),
    "mask": lambda x, wide: (wide > 0.5, 0.1),
    "places": lambda x, wide: (1, wide.argsort(1)),
    "classes": lambda x, wide: (wide.argmax(1),),
}


def _names_of_methods() -> list[str]:
    names = [name for name in dir(Tensor) if not name.startswith("_") and name not in LEFT_OUT]
    return [name for name in names if not any(kind in name for kind in OTHER_KINDS)]


def _functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield what is called, by its full name."""
    for name in _names_of_methods():
        yield name, lambda x, *args, name=name: getattr(x, name)(*args)
    for module in (torch, F):
        for name in sorted(FUNCTIONS - DRAWING):
            if hasattr(module, name):
                yield f"{module.__name__}.{name}", getattr(module, name)


def _results(casts: contextlib.AbstractContextManager[Any]) -> dict[tuple[str, str, torch.dtype], Any]:
    """Return what each call gives, by the name, the form and the type of the tensor."""
    found = {}
    with casts, torch.no_grad():
        for name, function in _functions():
            for form, make in FORMS.items():
                for dtype in (torch.float16, torch.float32):
                    wide = (torch.arange(16.0).view(4, 4) * 7 % 16 + 1) / 20
                    x = (1 - wide).to(dtype)
                    try:
                        result = function(x.clone(), *make(x, wide))
                    except Exception:  # the arguments do not fit
                        continue
                    first = result[0] if isinstance(result, (tuple, list)) and result else result
                    if isinstance(first, Tensor) and first.is_floating_point():
                        found[name, form, dtype] = (first.dtype, first.detach().clone())
    return found


@contextlib.contextmanager
def _casts_of_o1() -> Iterator[None]:
    handle = amp.init()
    try:
        yield
    finally:
        handle._deactivate()


@contextlib.contextmanager
def _casts_of_autocast() -> Iterator[None]:
    with cuda_casts(), torch.autocast("cpu", dtype=torch.float16):
        yield


def _takes_adapter(name: str) -> bool:
    """Return whether a network that calls a function or method takes the adapter."""
    if "." in name:
        module, _, last = name.rpartition(".")
        table = FUNCTIONAL if module == "torch.nn.functional" else PLAIN
        return name in OF_FUNCTIONAL or last in table
    if name in FORBIDDEN | INTO | IN_PLACE or name in PLAIN:
        return True
    module = Module(f"def forward(self, h):\n    return h.{name}()\n")
    return any(name_unfit_for_network(module, node) for node in module.nodes)


@pytest.mark.slow
def test_what_a_rewritten_network_may_call_gives_the_same_under_o1_and_autocast() -> None:
    """To the last digit, but for those that have a note, or take the adapter."""
    torch.set_num_threads(1)
    expected, found = _results(_casts_of_o1()), _results(_casts_of_autocast())
    both = expected.keys() & found.keys()
    assert len(both) > 1500
    other = {
        key
        for key in both
        if expected[key][0] is not found[key][0]
        or not torch.equal(expected[key][1].nan_to_num(), found[key][1].nan_to_num())
    }
    assert {"softmax", "square", "torch.nn.functional.gelu", "torch.layer_norm"} <= {
        name for name, _, _ in other
    }
    assert sorted(key for key in other if not _takes_adapter(key[0])) == []
