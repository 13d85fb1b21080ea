"""Triton's kernels of O2 against torch's: every bit, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ampcompare.apex import amp
from ampcompare.apex.amp._engine.errors import AmpOptionError
from ampcompare.apex.amp.frontend import KERNELS_VARIABLE, load_kernels
from ampcompare.base.errors import BackendUnavailable

# NumPy, by which the interpreter computes, warns of the overflows that are wanted here, and of how it is used.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

NAME = "ampcompare.apex.amp._engine.triton_kernels"
PATTERNS = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
WORDS = {2: torch.int16, 4: torch.int32}


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patches:
        if not torch.cuda.is_available():
            patches.setitem(os.environ, "TRITON_INTERPRET", "1")
        importlib.import_module(NAME)
    try:
        loaded = load_kernels("triton")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    try:
        loaded.round_into([torch.zeros(1, dtype=torch.float16)], [torch.zeros(1)])
    except Exception as error:  # of Triton's, which other versions may lack
        if "only 0-dimensional arrays" not in str(error):
            raise
        versions = [f"{name} {importlib.metadata.version(name)}" for name in ("triton", "numpy")]
        pytest.skip(f"the interpreter of {versions[0]} does not take {versions[1]}: {error}")
    return loaded


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal bits, where one NaN is as good as another."""
    word = WORDS[one.dtype.itemsize]
    equal = (one.view(word) == other.view(word)) | (one.isnan() & other.isnan())
    return one.dtype is other.dtype and bool(equal.all())


def unscaled_by_torch(sources: list[Tensor], inverse: Tensor) -> tuple[list[Tensor], float]:
    """What the plain tier makes of gradients: fp32 copies times the inverse, and the flag."""
    targets = [torch.empty_like(source, dtype=torch.float32) for source in sources]
    torch._foreach_copy_(targets, sources)
    flag = torch.zeros((), device=inverse.device)
    torch._amp_foreach_non_finite_check_and_unscale_(targets, flag, inverse)
    return targets, flag.item()


def special_floats() -> Tensor:
    """Values of fp32 at all exponents, with zeros, subnormals and the largest finite numbers."""
    exponents = torch.arange(256, dtype=torch.int32).view(-1, 1) << 23
    mantissas = torch.tensor([0, 1, 2, 0x0FFF, 0x1000, 0x1001, 0x3FFFFF, 0x400000, 0x7FFFFF], dtype=torch.int32)
    positive = (exponents | mantissas).flatten()
    return torch.cat([positive, positive | -(2**31)]).view(torch.float32)


@pytest.mark.parametrize("inverse", [1.0, 2.0**-16, 2.0**-24, 2.0**-126, 2.0**8, 1 / 1000.3, 3e38])
def test_unscale_of_all_halfs(kernels: Any, device: torch.device, inverse: float) -> None:
    """Each bit pattern of fp16 and bf16, and fp32 at all exponents, becomes what torch's two kernels make of it."""
    sources = [PATTERNS.view(torch.float16), PATTERNS.view(torch.bfloat16), special_floats()]
    sources = [source.to(device) for source in sources]
    factor = torch.tensor(inverse, device=device)
    for chosen in (sources, [source[source.isfinite()] for source in sources]):
        targets = [torch.empty_like(source, dtype=torch.float32) for source in chosen]
        flag = torch.zeros((), device=device)
        assert kernels.unscale_into(targets, chosen, flag, factor)
        expected, overflow = unscaled_by_torch(chosen, factor)
        assert all(same_bits(*pair) for pair in zip(targets, expected, strict=True))
        assert flag.item() == overflow == (len(chosen[0]) == len(PATTERNS))


def test_a_gradient_may_be_unscaled_in_place(kernels: Any, device: torch.device) -> None:
    """An fp32 gradient that is its own target is multiplied once, next to a half one of the same launch."""
    full, half = torch.full((5,), 3.0, device=device), torch.full((2000,), 2.0, dtype=torch.float16, device=device)
    target, flag = torch.empty(2000, device=device), torch.zeros((), device=device)
    assert kernels.unscale_into([full, target], [full, half], flag, torch.tensor(0.5, device=device))
    assert (full.unique().tolist(), target.unique().tolist(), flag.item()) == ([1.5], [1.0], 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding(kernels: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Exact values, ties, their neighbors, subnormals, overflows and random bits round as torch rounds them."""
    exact = PATTERNS.view(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    ties = exact[:-1] / 2 + exact[1:] / 2
    around = [ties.nextafter(torch.full_like(ties, side)) for side in (-torch.inf, torch.inf)]
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (50_000,), generator=generator).to(torch.int32).view(torch.float32)
    source = torch.cat([exact, ties, *around, special_floats(), bits]).to(device)
    target = torch.empty_like(source, dtype=dtype)
    assert kernels.round_into([target], [source])
    assert same_bits(target, source.to(dtype))


@pytest.mark.parametrize("overflows", [False, True])
def test_sizes_and_layouts(kernels: Any, device: torch.device, overflows: bool) -> None:
    """Nothing beyond a tensor is written, whatever its size, and the last element of the last one sets the flag."""
    sizes = [0, 1, 3, 1023, 1024, 1025, 16384, 16385, 40000]
    memory = torch.zeros(sum(sizes) + 8 * len(sizes), device=device)
    targets, sources, at = [], [], 3  # no alignment beyond that of the elements
    for size in sizes:
        targets.append(memory[at : at + size])
        sources.append(torch.ones(size + 1, dtype=torch.float16, device=device)[1:])
        at += size + 8
    image = torch.ones(2, 3, 4, 5, dtype=torch.float16, device=device).contiguous(memory_format=torch.channels_last)
    targets.append(torch.empty_like(image, dtype=torch.float32))
    sources.append(image)
    if overflows:
        sources[-2][-1] = torch.inf
    flag = torch.zeros((), device=device)
    assert kernels.unscale_into(targets, sources, flag, torch.tensor(0.25, device=device))
    assert flag.item() == overflows
    assert (memory != 0).sum().item() == sum(sizes)
    assert targets[-1].eq(0.25).all()
    back = [torch.zeros_like(source) for source in sources]
    assert kernels.round_into(back, targets)
    assert all(same_bits(one, source / 4) for one, source in zip(back, sources, strict=True))


def test_what_is_not_for_a_kernel_is_left_alone(kernels: Any, device: torch.device, monkeypatch: Any) -> None:
    """Gaps, unequal strides, other dtypes and layouts, and a CPU without the interpreter are refused."""
    flag, inverse = torch.zeros((), device=device), torch.ones((), device=device)
    half, full = torch.ones(4, 4, dtype=torch.float16, device=device), torch.zeros(4, 4, device=device)
    for source, target in (
        (half[:, :2], full[:, :2]),
        (half.t(), full),
        (half.double(), full),
        (half, full.half()),
        (half.to_sparse(), full),
        (half[:0], full[:0]),
    ):
        assert not kernels.unscale_into([target], [source], flag, inverse)
    assert not kernels.round_into([full], [full])
    assert not full.any()
    if device.type == "cpu":
        monkeypatch.setattr(kernels, "INTERPRETED", False)
        assert not kernels.unscale_into([full], [half], flag, inverse)


def test_rounding_is_a_change_for_autograd(kernels: Any, device: torch.device) -> None:
    """A weight that the kernel wrote after a forward pass makes a late backward pass raise, as after any step."""
    weight = torch.ones(3, dtype=torch.float16, device=device, requires_grad=True)
    loss = (weight * weight).sum()
    with torch.no_grad():
        assert kernels.round_into([weight], [torch.zeros(3, device=device)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Net(nn.Module):
    """Convolution, batch norm and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 3, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.convolution(x)).flatten(1))  # type: ignore[no-any-return]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No kernels from the environment, no choice of convolutions by time, and the end of the session."""
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    yield
    amp._amp_state.close()


def trajectory(name: str, device: torch.device, **options: Any) -> list[Any]:
    """Weights, masters and scales of O2 over overflows and accumulated gradients."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0, kernels=name, **options)
    seen: list[Any] = []
    for index in range(8):
        for part in range(2):
            x = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(10 * index + part)).to(device)
            loss = model(x).float().square().mean() / 8
            if index in (0, 4) and part == 1:
                loss = loss * torch.inf
            # Every other step unscales after each pass, so that the second one adds to masters' gradients.
            with amp.scale_loss(loss, optimizer, delay_unscale=index % 2 == 0 and part == 0) as scaled:
                scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [param.detach().clone() for param in (*model.parameters(), *amp.master_params(optimizer))]
        seen.append(torch.tensor(amp._amp_state.loss_scalers[0].loss_scale()))
    amp._amp_state.close()
    return seen


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_o2_takes_the_kernels(
    kernels: Any, device: torch.device, session: None, monkeypatch: pytest.MonkeyPatch, loss_scale: Any
) -> None:
    calls: list[str] = []
    for name in ("unscale_into", "round_into"):
        original = getattr(kernels, name)

        def noted(*args: Any, name: str = name, original: Any = original) -> bool:
            done: bool = original(*args)
            calls.append(f"{name} {done}")
            return done

        monkeypatch.setattr(kernels, name, noted)
    plain = trajectory("torch", device, loss_scale=loss_scale)
    assert not calls
    ours = trajectory("triton", device, loss_scale=loss_scale)
    assert all(same_bits(*pair) for pair in zip(ours, plain, strict=True))
    passes, steps = 12, 6 if loss_scale == "dynamic" else 8
    assert calls.count("unscale_into True") == passes
    assert calls.count("round_into True") == steps
    assert len(calls) == passes + steps


def test_a_static_scale_of_1_needs_no_kernel(kernels: Any, device: torch.device, session: None) -> None:
    """Where nothing is to be unscaled gradients are copied only."""
    plain, ours = (trajectory(name, device, loss_scale=1.0) for name in ("torch", "triton"))
    assert all(same_bits(*pair) for pair in zip(ours, plain, strict=True))


def test_unknown_kernels(session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that means nothing is refused, by the argument and by the environment."""
    with pytest.raises(AmpOptionError, match="Unexpected kernels 'cuda'"):
        load_kernels("cuda")
    monkeypatch.setenv(KERNELS_VARIABLE, "fast")
    with pytest.raises(AmpOptionError, match="Unexpected kernels 'fast'"):
        amp.initialize(nn.Linear(1, 1), opt_level="O2", verbosity=0)


def test_without_triton(session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton is missing the error says what to install."""
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(BackendUnavailable, match=r"pip install ampcompare\[triton\]"):
        load_kernels("triton")


def test_without_a_gpu(kernels: Any, session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU they are refused, unless the interpreter is asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    with pytest.raises(BackendUnavailable, match="TRITON_INTERPRET=1"):
        load_kernels("triton")


def test_without_a_compiler(kernels: Any, session: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles its launcher by a C compiler; without one that is said before the first step."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BackendUnavailable, match="gcc or clang"):
        load_kernels("triton")
    monkeypatch.setenv("CC", "/opt/cc")
    assert load_kernels("triton") is kernels
