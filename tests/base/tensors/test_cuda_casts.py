"""The casts of autocast for CUDA on a CPU, against recordings of torch's own kernels for CUDA.

The recordings hold the types of results, and what is refused, for tensors without memory that claim to be on a GPU.
"""

import gzip
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ampcompare.base.tensors.cuda_casts import (
    NAMED_DIMENSIONS,
    SPARE,
    CastKind,
    cast_of_operation,
    cuda_casts,
    is_casting_as_on_cuda,
    operations_with_autocast_kernel,
)
from ampcompare.training.precision.cpu_half import EmulatedHalf
from tests.base.tensors.autocast_expressions import EXPRESSIONS, Tensors

VERSION = torch.__version__.partition("+")[0]
RECORDED = Path(__file__).parent / "autocast_on_cuda" / f"{VERSION}.json.gz"
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
LISTS = {
    "AT_FORALL_LOWER_PRECISION_FP": CastKind.LOWER,
    "AT_FORALL_FP32": CastKind.FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": CastKind.FP32,
    "AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE": CastKind.FP32,
    "AT_FORALL_PROMOTE": CastKind.WIDEST,
}
NO_DRIVER = "the recording needs a driver for it"
NO_LAPACK = "a tensor without memory shows a type, and no LAPACK, that of CUDA neither, has 16 bits"
ONE_TYPE = (
    "the kernels of CUDA and CPU check that both are of one type, which a tensor without memory is not asked"
)
FLOAT64 = "weights of fp32 meet inputs of float64, which kernels refuse and a tensor without memory does not"
# Where a recording is not what a GPU does, by expression: why, and for which patterns; all of them without one.
ARTEFACTS: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("gru_cell", "fake_quantize", "LSTM module", "GRU module", "RNN module"), (NO_DRIVER, ())),
    "ctc_loss": (NO_DRIVER, ("f", "fh", "d")),
    "gaussian_nll_loss": ("it reads a value, which a tensor without memory lacks", ()),
    **dict.fromkeys(("MultiheadAttention", "BatchNorm2d module", "TransformerEncoderLayer"), (FLOAT64, ("d",))),
    **dict.fromkeys(("linalg.cross", "index_put_", "index_add", "index_copy", "weight_norm"), (ONE_TYPE, ("hf", "fh"))),
    **dict.fromkeys(("svd", "qr", "cholesky", "eigh", "det"), (NO_LAPACK, ("h", "hf"))),
    "linalg.solve": (NO_LAPACK, ("h",)),
}  # fmt: skip
# artefacts that not every torch has
OF_SOME_VERSIONS = {"LSTM module", "RNN module", "TransformerEncoderLayer"}
needs_recording = pytest.mark.skipif(not RECORDED.is_file(), reason=f"no recording of torch {VERSION}")


def recorded() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return data


@pytest.fixture
def casts() -> Iterator[None]:
    """Autocast in fp16 with the casts of CUDA, for one test."""
    with EmulatedHalf(), cuda_casts(), torch.autocast("cpu", dtype=torch.float16):
        yield


def half(*shape: int) -> Tensor:
    return torch.rand(*shape).half()


def type_of(call: Callable[[], Any]) -> str:
    try:
        result = call()
    except (RuntimeError, NotImplementedError, IndexError):
        return "refused"
    return str(result.dtype).removeprefix("torch.")


@needs_recording
def test_each_cast_is_that_of_torchs_lists() -> None:
    """What is asked of torch's kernels is what its header says, for every operation of its lists."""
    listed = {f"aten::{name}": LISTS[macro] for macro, names in recorded()["lists"].items() for name in names}
    known = {name: cast for name, cast in listed.items() if name in operations_with_autocast_kernel("CUDA")}
    known = {name: cast for name, cast in known.items() if not name.endswith(NAMED_DIMENSIONS)}
    assert len(known) > 100
    assert {name: cast_of_operation(name) for name in known} == known
    assert cast_of_operation("aten::binary_cross_entropy") is CastKind.REFUSED
    # torch 2.14 registers linalg_matrix_sqrth next to its lists.
    others = ("aten::cudnn", "aten::_cudnn", "aten::binary_cross_entropy", "aten::linalg_matrix_sqrth")
    unlisted = {
        name for name in operations_with_autocast_kernel("CUDA") - set(listed) if name.startswith("aten::")
    }
    assert not [name for name in unlisted if not name.startswith(others)]


@pytest.mark.parametrize(
    ("name", "cast"),
    [
        ("sum.dim_IntList", CastKind.FP32),
        ("mm", CastKind.LOWER),
        ("addcmul", CastKind.WIDEST),
        ("tanh", CastKind.NONE),
    ],
)
def test_a_cast_that_is_asked_for_while_a_compiler_traces_is_the_same(name: str, cast: CastKind) -> None:
    """An operation is asked about once, at its first call, which may be in a graph that is traced."""
    with FakeTensorMode(), FunctionalTensorMode():
        assert cast_of_operation(f"aten::{name}") is cast


@needs_recording
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HALVES)
def test_types_and_refusals_are_those_of_cuda(name: str) -> None:
    """Every expression of the recording, in every pattern of inputs, except the artefacts, which must be some."""
    data, dtype = recorded(), HALVES[name]
    differing: dict[str, set[str]] = {}
    with EmulatedHalf(), cuda_casts():
        for expression, line in data["types"].items():
            for key, expected in zip(data["patterns"], line.split(), strict=True):
                of, pattern = key.split()
                if of != name:
                    continue
                torch.manual_seed(0)
                with torch.autocast("cpu", dtype=dtype):
                    found = type_of(lambda: EXPRESSIONS[expression](Tensors(pattern, dtype)))  # noqa: B023
                if found != expected:
                    differing.setdefault(expression, set()).add(pattern)
    unexplained = {
        expression: patterns
        for expression, patterns in differing.items()
        if expression not in ARTEFACTS
        or (ARTEFACTS[expression][1] and patterns - set(ARTEFACTS[expression][1]))
    }
    assert not unexplained
    assert set(ARTEFACTS) - set(differing) <= OF_SOME_VERSIONS


def test_layers_that_cudnn_computes_return_16_bits(casts: None) -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        layer = kind(3, 4)
        output = layer(torch.rand(5, 2, 3))[0]
        assert output.dtype is torch.float16
        output.float().sum().backward()
        assert all(
            weight.grad.dtype is torch.float32 and weight.grad.abs().sum() > 0
            for weight in layer.parameters()
        )
    packed = nn.utils.rnn.pack_sequence([torch.rand(3, 3), torch.rand(2, 3)])
    assert nn.GRU(3, 4)(packed)[0].data.dtype is torch.float16


def test_what_cuda_refuses_is_refused_in_its_words(casts: None) -> None:
    """Also where a CPU would compute it, or where tensors are of the 16-bit type that autocast is not in."""
    with pytest.raises(
        RuntimeError, match=r"binary_cross_entropy and torch\.nn\.BCELoss are unsafe to autocast"
    ):
        nn.BCELoss()(torch.rand(3), torch.rand(3))
    with torch.autocast("cpu", enabled=False):
        assert nn.BCELoss()(torch.rand(3), torch.rand(3)).isfinite()
    with pytest.raises(RuntimeError, match="Unexpected floating ScalarType in at::autocast::prioritize"):
        torch.dot(torch.rand(3).bfloat16(), torch.rand(3).bfloat16())
    with pytest.raises(RuntimeError, match=r"quantile\(\) input tensor must be either float or double"):
        torch.quantile(half(4), 0.5)
    for refused in (torch.linalg.inv, torch.linalg.svd, torch.linalg.qr, torch.pinverse):
        with pytest.raises(RuntimeError):
            refused(half(3, 3))
        refused(torch.rand(3, 3))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: functional.avg_pool3d(x.reshape(1, 1, 4, 4, 4), 2),
        lambda x: functional.adaptive_avg_pool3d(x.reshape(1, 1, 4, 4, 4), 2),
        lambda x: functional.max_pool3d(x.reshape(1, 1, 4, 4, 4), 2),
        lambda x: functional.pad(x.reshape(1, 1, 8, 8), (1, 1, 1, 1), mode="reflect"),
        lambda x: functional.grid_sample(
            x.reshape(1, 1, 8, 8), x[:18].reshape(1, 3, 3, 2), align_corners=False
        ),
        lambda x: torch.trace(x.reshape(8, 8)),
    ],
)
def test_what_only_the_cpu_casts_is_computed_in_fp32_and_rounded_once(casts: None, call: Any) -> None:
    """Forward and backward."""
    x = half(64).requires_grad_()
    wide = x.detach().float().requires_grad_()
    result = call(x)
    with torch.autocast("cpu", enabled=False):
        exact = call(wide)
        exact.square().sum().backward()
    assert result.dtype is torch.float16
    assert torch.equal(result, exact.half())
    result.float().square().sum().backward()
    assert x.grad is not None
    assert wide.grad is not None
    torch.testing.assert_close(x.grad.float(), wide.grad, rtol=4e-3, atol=4e-3)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize(
    "names", [("rfft", "irfft"), ("fft", "hfft"), ("fft2", "ifft2"), ("rfftn", "irfftn")]
)
def test_fourier_transforms_of_16_bits_are_computed_in_32(casts: None, names: tuple[str, str]) -> None:
    """Real ones and complex ones, in which a CPU has none, and their backward pass; each result is rounded once."""
    there, back = (getattr(torch.fft, name) for name in names)
    x = half(4, 8).requires_grad_()
    wide = x.detach().float().requires_grad_()
    middle = there(x)
    result = back(middle)
    assert middle.dtype is torch.complex32
    with torch.autocast("cpu", enabled=False):
        exact = back(there(wide).to(torch.complex32).to(torch.complex64))
        (exact.real if exact.is_complex() else exact).square().sum().backward()
    result, exact = (torch.view_as_real(one) if one.is_complex() else one for one in (result, exact))
    assert torch.equal(result, exact.half())
    (result[..., 0] if names[1] == "ifft2" else result).float().square().sum().backward()
    assert x.grad is not None
    assert wide.grad is not None
    assert (x.grad.float() - wide.grad).norm() < 4e-3 * wide.grad.norm()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_short_time_transform_rounds_after_its_window(casts: None) -> None:
    """As its parts do on a GPU: the product with the window is in 16 bits. Its inverse knows 16 bits too."""
    x, window = half(32).sub(0.5).requires_grad_(), torch.hann_window(8).half()
    result = torch.stft(x, 8, window=window, hop_length=4, center=False, return_complex=True)
    assert result.dtype is torch.complex32
    with torch.autocast("cpu", enabled=False):
        exact = torch.fft.rfft((x.detach().unfold(0, 8, 4) * window).float()).T
    assert torch.equal(torch.view_as_real(result), torch.view_as_real(exact).half())
    back = torch.istft(result, 8, window=window, hop_length=4, center=True)
    assert back.dtype is torch.float32  # its envelope is a sum of squares
    torch.view_as_real(result).float().square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_backward_is_in_fp32_where_forward_is(casts: None) -> None:
    """The gradient of each is that of a function in fp32, rounded once, when it reaches a tensor of 16 bits."""
    for call in (torch.exp, torch.Tensor.square, lambda x: x.softmax(0), lambda x: functional.layer_norm(x, (8,)),
                 lambda x: x.pow(3), lambda x: x.norm(), lambda x: x.cumsum(0), lambda x: x.logsumexp(0)):  # fmt: skip
        x = half(8).requires_grad_()
        wide = x.detach().float().requires_grad_()
        call(x).pow(2).sum().backward()
        with torch.autocast("cpu", enabled=False):
            call(wide).pow(2).sum().backward()
        assert x.grad is not None
        assert wide.grad is not None
        assert torch.equal(x.grad, wide.grad.half())


def test_interpolation_is_in_fp32(casts: None) -> None:
    """A bicubic overshoot does not become infinite."""
    edge = torch.tensor([-60000.0, 60000.0]).repeat(4, 2).reshape(1, 1, 4, 4).half()
    large = functional.interpolate(edge, scale_factor=2, mode="bicubic")
    assert large.dtype is torch.float32
    assert large.isfinite().all()
    assert large.abs().max() > 65504


@pytest.mark.parametrize("enabled", [True, False])
def test_weights_are_cast_once_in_a_block(enabled: bool) -> None:
    """Gradients of two uses meet in 16 bits by the cache, also of functions that a CPU does not cast; else in fp32."""
    weight = torch.nn.Parameter(torch.rand(4, 4))
    x = torch.rand(2, 4)
    with EmulatedHalf(), cuda_casts(), torch.autocast("cpu", torch.float16, cache_enabled=enabled):
        loss = torch.einsum("ij,jk->ik", x, weight).float().sum() + (x @ weight).float().mul(3e-4).sum()
        loss = loss + torch.mv(weight, x[0]).float().sum()
        loss.backward()
    copy = weight.detach().half().requires_grad_()
    products = (x.half() @ copy, (x.half() @ copy).float().mul(3e-4), torch.mv(copy, x[0].half()))
    parts = [each.float().sum() for each in products]
    with EmulatedHalf():
        if enabled:
            torch.stack(parts).sum().backward()
            assert copy.grad is not None
            assert torch.equal(weight.grad, copy.grad.float())  # type: ignore[arg-type]
        else:
            each = [torch.autograd.grad(part, copy)[0].float() for part in reversed(parts)]
            assert torch.equal(weight.grad, each[0] + each[1] + each[2])  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(3,), (3, 2), (2, 3, 2), (2, 2, 3, 2)])
def test_the_cache_knows_weights_of_any_shape(casts: None, shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.rand(shape))
    other = torch.rand(shape)
    letters = "abcd"[: len(shape)]
    nodes = [torch.einsum(f"{letters},{letters}->", weight, other) for _ in range(2)]
    sum(node.float() for node in nodes).backward()  # type: ignore[union-attr]
    assert torch.equal(weight.grad, 2 * other.half().float())  # type: ignore[arg-type]


def test_nothing_is_cast_where_autocast_is_off(casts: None) -> None:
    with torch.autocast("cpu", enabled=False):
        assert half(3).exp().dtype is torch.float16
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.mv(torch.rand(2, 3), torch.rand(3)).dtype is torch.bfloat16
            assert torch.rand(3).bfloat16().exp().dtype is torch.float32
        assert half(3).exp().dtype is torch.float16
    with torch.no_grad():
        assert half(3).exp().dtype is torch.float32
    assert half(3).exp().dtype is torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_is_cast_alike(reentrant: bool) -> None:
    seen: list[torch.dtype] = []

    def part(x: Tensor) -> Tensor:
        y = (x @ x.T).exp()
        seen.append(y.dtype)
        return y.softmax(-1)

    x = torch.rand(3, 3, requires_grad=True)
    with EmulatedHalf(), cuda_casts():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = checkpoint(part, x, use_reentrant=reentrant).sum()
        loss.backward()
    assert seen == [torch.float32, torch.float32]


def test_functions_of_a_script_see_the_casts_of_their_decorators(casts: None) -> None:
    class Exponential(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx: Any, x: Tensor) -> Tensor:
            types.append(x.exp().dtype)
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            types.append(grad.half().exp().dtype)
            return grad

    types: list[torch.dtype] = []
    x = half(3).requires_grad_()
    loss = Exponential.apply(x).sum()
    with torch.autocast("cpu", enabled=False):
        loss.backward()
    assert types == [torch.float32, torch.float32]


def test_torch_is_unchanged_outside() -> None:
    """Before, after, and in other threads; after an error too."""
    setter = torch.set_autocast_enabled
    types: list[torch.dtype] = []

    def look() -> None:
        with torch.autocast("cpu", dtype=torch.float16), EmulatedHalf():
            types.extend([half(3).exp().dtype, functional.avg_pool3d(half(1, 2, 2, 2), 2).dtype])

    look()
    with cuda_casts(), torch.autocast("cpu", dtype=torch.float16):
        assert is_casting_as_on_cuda()
        assert half(3).exp().dtype is torch.float32
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    with pytest.raises(ZeroDivisionError), cuda_casts(), torch.autocast("cpu", dtype=torch.float16):
        1 / 0  # noqa: B018
    look()
    assert types == 3 * [torch.float16, torch.float32]
    assert torch.set_autocast_enabled is setter
    assert not is_casting_as_on_cuda()
    assert torch._C._dispatch_tls_is_dispatch_key_excluded(getattr(torch._C.DispatchKey, SPARE))


def test_other_threads_cast_too_where_all_are_to(casts: None) -> None:
    types = []

    def look() -> None:
        with torch.autocast("cpu", dtype=torch.float16):
            types.append(half(3).exp().dtype)

    with cuda_casts(everywhere=True):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert types == [torch.float32]


def test_transforms_and_compiled_functions_are_cast(casts: None) -> None:
    assert torch.func.vmap(lambda x: x.exp())(half(2, 3)).dtype is torch.float32
    assert torch.func.grad(lambda x: x.exp().sum())(half(3)).dtype is torch.float16
    weight = nn.Parameter(torch.rand(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        types = torch.func.vmap(lambda x: torch.einsum("ij,j->i", weight, x))(torch.rand(2, 3)).dtype
    assert types is torch.float16


def test_what_computes_a_list_of_tensors_is_not_cast_inside() -> None:
    """One kernel of CUDA does that; the CPU's calls `linalg_vector_norm`, which autocast for CUDA computes in fp32."""
    gradients = [torch.linspace(-1.0, 2.0, 50).bfloat16(), torch.linspace(0.0, 1.0, 7)]
    plain = torch._foreach_norm(gradients)
    with cuda_casts(), torch.autocast("cpu", dtype=torch.bfloat16):
        cast = torch._foreach_norm(gradients)
        torch._foreach_mul_(gradients, 2.0)
        assert torch.linalg.vector_norm(gradients[0]).dtype is torch.float32
    assert [one.dtype for one in cast] == [torch.bfloat16, torch.float32]
    assert all(map(torch.equal, cast, plain))


def test_a_script_that_opens_autocast_in_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is asked in a thread that no replaced `Thread.run` reaches: it would ask again without end."""

    def refuse(thread: threading.Thread) -> None:
        raise AssertionError("a thread of threading was started")

    monkeypatch.setattr(threading.Thread, "run", refuse)
    assert cast_of_operation("aten::softmax.int") is CastKind.FP32
