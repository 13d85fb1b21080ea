"""Arms that train by autocast on a CPU cast as torch does on CUDA, in a process of the user's too."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ampcompare
from ampcompare.backends.arm import Arm
from ampcompare.base.errors import ConfigError
from ampcompare.base.tensors.cuda_casts import cuda_casts, is_casting_as_on_cuda
from ampcompare.training.precision.base import Precision, make_precision
from ampcompare.training.precision.cpu_half import EmulatedHalf

ARMS = ("native:fp16", "native:bf16", "native:bf16,weights=bf16", "fp8")


def types_in(precision: Precision) -> list[torch.dtype]:
    """Return the types of a softmax, a sum, and a padded image in 16 bits."""
    assert precision.half_dtype is not None
    half = torch.rand(1, 4, 4).to(precision.half_dtype)
    with precision.autocast():
        return [half.softmax(-1).dtype, half.sum().dtype, functional.pad(half, (1, 1), mode="reflect").dtype]


@pytest.mark.parametrize("arm", [*ARMS[:-1], pytest.param(ARMS[-1], marks=pytest.mark.slow)])  # compiles
def test_an_arm_casts_as_cuda_does_or_as_the_cpu_does(arm: str) -> None:
    """Softmax and sums in fp32 and padding in 16 bits, or the other way round; and not outside of its blocks."""
    library = Arm.parse(arm).spec.library
    if library is not None and library.why_missing():
        pytest.skip(library.why_missing())
    precision = make_precision(arm)
    half = precision.half_dtype
    assert half is not None
    assert types_in(precision) == [torch.float32, torch.float32, half]
    assert types_in(make_precision(arm, autocast_lists="cpu")) == [half, half, torch.float32]
    assert not is_casting_as_on_cuda()
    with torch.autocast("cpu", dtype=half):
        assert torch.rand(3).to(half).exp().dtype is half


def test_other_lists_are_refused() -> None:
    with pytest.raises(ConfigError, match="autocast_lists is 'gpu'; it is cuda or cpu"):
        ampcompare.make_precision("native:fp16", autocast_lists="gpu")


def test_what_cannot_start_on_a_gpu_does_not_start_here() -> None:
    probabilities, target = torch.rand(3), torch.rand(3)
    with make_precision("native:fp16").autocast(), pytest.raises(RuntimeError, match="unsafe to autocast"):
        nn.BCELoss()(probabilities, target)
    with make_precision("native:fp16", autocast_lists="cpu").autocast():
        nn.BCELoss()(probabilities, target)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("arm", ARMS[:3])
def test_a_checkpoint_computes_again_as_before(arm: str, reentrant: bool) -> None:
    precision = make_precision(arm)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision.prepare([model], [optimizer])
    seen = []

    def part(x: Tensor) -> Tensor:
        y = x.exp()
        seen.append(y.dtype)
        return y.neg().exp()

    with precision.autocast():
        loss = checkpoint(part, model(torch.rand(2, 3)), use_reentrant=reentrant).float().mean()
    precision.backward(loss, [optimizer])
    assert seen == [torch.float32, torch.float32]
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16


class UNet(nn.Module):
    """A small U-Net of volumes and images: pools, padding and interpolation, of which a CPU casts others than CUDA."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.flat = flat
        conv: Any = nn.Conv2d if flat else nn.Conv3d
        self.down, self.middle, self.up = conv(1, 4, 3), conv(4, 4, 1), conv(8, 2, 1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        mode = "reflect" if self.flat else "replicate"
        x = functional.pad(x, (1, 1) * (2 if self.flat else 3), mode=mode)
        wide = self.norm(self.down(x)).relu()
        pool = functional.avg_pool2d if self.flat else functional.max_pool3d
        small = functional.interpolate(self.middle(pool(wide, 2)), size=wide.shape[2:], mode="nearest")
        return self.up(torch.cat([wide, small], 1))  # type: ignore[no-any-return]


class Speech(nn.Module):
    """A recurrent network with a loss of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0]).log_softmax(-1)  # type: ignore[no-any-return]


class Sampler(nn.Module):
    """A head that samples features where it predicts boxes to be."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.boxes = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(16, 18)

    def forward(self, x: Tensor) -> Tensor:
        where = self.boxes(x.flatten(1)).tanh().reshape(-1, 3, 3, 2)
        return functional.grid_sample(self.features(x), where, align_corners=False)


def speech_loss(out: Tensor) -> Tensor:
    targets = torch.ones(len(out), 2, dtype=torch.long)
    return functional.ctc_loss(out.transpose(0, 1), targets, [out.shape[1]] * len(out), [2] * len(out))


NETWORKS: dict[str, Any] = {
    "images": (
        lambda: UNet(True),
        (2, 1, 8, 8),
        lambda out: functional.cross_entropy(out, torch.ones(2, 8, 8).long()),
    ),
    "volumes": (lambda: UNet(False), (1, 1, 4, 4, 4), lambda out: out.square().mean()),
    "speech": (Speech, (2, 6, 4), speech_loss),
    "detection": (Sampler, (2, 1, 4, 4), lambda out: functional.smooth_l1_loss(out, torch.ones_like(out))),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_our_loop_is_a_loop_by_hand_under_the_casts_of_cuda(name: str, dtype: str) -> None:
    """Losses and weights of three steps, bit for bit; and others than by the CPU's lists."""
    make, shape, measure = NETWORKS[name]
    torch.manual_seed(0)
    start, batches = make(), torch.rand(3, *shape)
    half = torch.float16 if dtype == "fp16" else torch.bfloat16

    def by_arm(**lists: str) -> list[Tensor]:
        model = copy.deepcopy(start)
        precision = make_precision(f"native:{dtype}", **lists)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        precision.prepare([model], [optimizer])
        for x in batches:
            with precision.autocast():
                loss = measure(model(x))
            precision.backward(loss, [optimizer])
            precision.step(optimizer)
            optimizer.zero_grad()
        return [loss.detach(), *model.state_dict().values()]

    def by_hand() -> list[Tensor]:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=half is torch.float16)
        for x in batches:
            with cuda_casts(), torch.autocast("cpu", dtype=half):
                loss = measure(model(x))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [loss.detach(), *model.state_dict().values()]

    with EmulatedHalf(half):
        ours, theirs, others = by_arm(), by_hand(), by_arm(autocast_lists="cpu")
    assert all(map(torch.equal, ours, theirs))
    assert all(map(torch.isfinite, ours[:1]))
    assert not all(map(torch.equal, ours, others))
