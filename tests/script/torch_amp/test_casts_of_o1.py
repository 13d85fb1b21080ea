"""Under O1 and O4 a script without mixed precision computes everything as with calls of `apex.amp` by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.script.torch_amp import plain_script
from tests.script.small_script import batch, network
from tests.script.trainings import has_bits

pytestmark = pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning")
STEPS = 3


class Plain:
    """A script that knows no mixed precision."""

    def begin(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        """Prepare nothing."""

    def backward(self, loss: Tensor, *optimizers: Any, **options: Any) -> None:
        loss.backward(**options)

    def step(self, optimizer: Any, closure: Callable[[], Any]) -> None:
        optimizer.step(closure)


class ByHand(Plain):
    """The same script for Apex."""

    def __init__(self, amp: Any, level: str) -> None:
        self.amp, self.level = amp, level

    def begin(self, models: list[nn.Module], optimizers: list[Any]) -> None:
        self.amp.initialize(models, optimizers, opt_level=self.level, loss_scale=128.0, verbosity=0)

    def backward(self, loss: Tensor, *optimizers: Any, **options: Any) -> None:
        with self.amp.scale_loss(loss, list(optimizers)) as scaled:
            scaled.backward(**options)

    def step(self, optimizer: Any, closure: Callable[[], Any]) -> None:
        closure()
        optimizer.step()


def sgd(*models: nn.Module) -> Any:
    return torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1, momentum=0.9)


def prepared(side: Plain) -> tuple[nn.Module, Any]:
    model = network()
    optimizer = sgd(model)
    side.begin([model], [optimizer])
    return model, optimizer


def two_losses(side: Plain, seen: list[Tensor]) -> None:
    """The second one is computed from the same outputs behind the first backward pass."""
    model, optimizer = prepared(side)
    for step in range(STEPS):
        x, y = batch(step)
        out = model(x)
        optimizer.zero_grad()
        side.backward(F.cross_entropy(out, y), optimizer, retain_graph=True)
        target = F.one_hot(y, 3).float() * 0.9 + 0.03
        second = (
            F.mse_loss(out, target)
            + out.pow(2).mean()
            + F.kl_div(F.log_softmax(out, 1), target, reduction="sum") * 0.1
        )
        side.backward(second, optimizer)
        optimizer.step()
        seen += [second.detach(), *(param.detach().clone() for param in model.parameters())]


def gradient_penalty(side: Plain, seen: list[Tensor]) -> None:
    """Gradients of an input, in the loss and in one that follows it."""
    model, optimizer = prepared(side)
    for step in range(STEPS):
        x, y = batch(step)
        x.requires_grad_()
        out = model(x)
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        side.backward(
            F.cross_entropy(out, y) + (slope.norm(2, dim=1) - 1).pow(2).mean(), optimizer, retain_graph=True
        )
        (slope,) = torch.autograd.grad(F.softplus(out).mean(), x, create_graph=True)
        side.backward((slope @ slope.t()).norm(), optimizer)
        optimizer.step()
        seen += [slope.detach(), *(param.detach().clone() for param in model.parameters())]


def gan(side: Plain, seen: list[Tensor]) -> None:
    """Two losses of a judge, then one of the maker, which compares features with those from before."""
    torch.manual_seed(0)
    maker, body, head = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2)), nn.Linear(8, 1)
    for_maker, for_judge = sgd(maker), sgd(body, head)
    side.begin([maker, body, head], [for_maker, for_judge])
    for step in range(STEPS):
        real, _ = batch(step)
        for_judge.zero_grad()
        features = body(real)
        of_real = head(features)
        side.backward(F.binary_cross_entropy_with_logits(of_real, torch.ones_like(of_real)), for_judge)
        fake = maker(batch(step, 1)[0])
        of_fake = head(body(fake.detach()))
        side.backward(F.binary_cross_entropy_with_logits(of_fake, torch.zeros_like(of_fake)), for_judge)
        for_judge.step()
        for_maker.zero_grad()
        made = body(fake)
        loss = F.binary_cross_entropy_with_logits(head(made), torch.ones_like(of_fake))
        side.backward(loss + F.l1_loss(made, features.detach()), for_maker)
        for_maker.step()
        seen += [loss.detach(), F.mse_loss(of_real, of_fake).detach()]
        seen += [param.detach().clone() for net in (maker, body, head) for param in net.parameters()]


def metrics(side: Plain, seen: list[Tensor]) -> None:
    """Numbers from outputs behind the backward pass and behind the step."""
    model, optimizer = prepared(side)
    for step in range(STEPS):
        x, y = batch(step)
        out = model(x)
        optimizer.zero_grad()
        side.backward(F.cross_entropy(out, y), optimizer)
        seen += [F.l1_loss(out, out.roll(1)).detach(), out.detach() @ out.detach().t()]
        optimizer.step()
        out = out.detach()
        seen += [
            F.softmax(out, 1),
            F.cross_entropy(out, y),
            out.norm(),
            out.std(),
            F.cosine_similarity(out, x[:, :3]),
        ]
        seen += [torch.cat([out, x]) if out.shape[1] == x.shape[1] else torch.stack([out, x[:, :3]])]
        seen += [
            torch.exp(out),
            out * x[:, :3],
            F.normalize(out),
            *(p.detach().clone() for p in model.parameters()),
        ]


def accumulation(side: Plain, seen: list[Tensor]) -> None:
    """Micro-batches, and a loss of all their outputs after the last one."""
    model, optimizer = prepared(side)
    for step in range(STEPS):
        outs = []
        for micro in range(3):
            x, y = batch(step, micro)
            outs.append(model(x))
            side.backward(F.cross_entropy(outs[-1], y) / 3, optimizer, retain_graph=True)
        side.backward(F.smooth_l1_loss(outs[0], outs[1]) + F.softplus(torch.stack(outs)).mean(), optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen += [param.detach().clone() for param in model.parameters()]


def closure(side: Plain, seen: list[Tensor]) -> None:
    """A closure with two backward passes."""
    model, optimizer = prepared(side)
    for step in range(STEPS):
        x, y = batch(step)
        outs = []

        def passes(x: Tensor = x, y: Tensor = y, outs: list[Tensor] = outs) -> Tensor:
            optimizer.zero_grad()
            out = model(x)
            outs.append(out.detach())
            loss = F.cross_entropy(out, y)
            side.backward(loss, optimizer, retain_graph=True)
            side.backward(F.mse_loss(out, torch.zeros_like(out)), optimizer)
            return loss

        side.step(optimizer, passes)
        seen += [F.log_softmax(outs[0], 1), *(param.detach().clone() for param in model.parameters())]


def evaluation(side: Plain, seen: list[Tensor]) -> None:
    """Between forward and backward pass, behind the step, and with averaged weights swapped in behind torch's back."""
    model, optimizer = prepared(side)
    mean = copy.deepcopy(model.state_dict())
    for step in range(STEPS):
        x, y = batch(step)
        out = model(x)
        with torch.no_grad():
            target = model(batch(step, 1)[0])
        second = model(batch(step, 2)[0])
        optimizer.zero_grad()
        side.backward(F.cross_entropy(out, y) + F.mse_loss(second, target), optimizer)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            own = {name: value.clone() for name, value in model.state_dict().items()}
            seen.append(F.cross_entropy(model(x), y))
            for name, value in model.state_dict().items():
                mean[name] = mean[name] * 0.5 + value * 0.5
            model.load_state_dict(mean)
            seen.append(F.cross_entropy(model(x), y))
            model.load_state_dict(own)
        model.train()
        seen += [param.detach().clone() for param in model.parameters()]


def distillation(side: Plain, seen: list[Tensor]) -> None:
    """A frozen model runs before the one that is trained; data come from products."""
    torch.manual_seed(1)
    teacher, mix = nn.Linear(6, 3).requires_grad_(requires_grad=False), torch.randn(6, 6) * 0.4
    student, other = network(), nn.Linear(3, 3)
    optimizer, second = sgd(student), sgd(other)
    side.begin([student, other], [optimizer, second])
    for step in range(STEPS):
        x = batch(step)[0] @ mix
        soft = teacher(x)
        out = student(x)
        loss = F.kl_div(F.log_softmax(out, 1), F.softmax(soft, 1), reduction="batchmean")
        optimizer.zero_grad()
        second.zero_grad()
        side.backward(loss, optimizer)
        optimizer.step()
        side.backward(F.mse_loss(other(out.detach()), soft), second)
        second.step()
        seen += [x, soft, *(param.detach().clone() for net in (student, other) for param in net.parameters())]


def penalties(side: Plain, seen: list[Tensor]) -> None:
    """Products of weights outside of modules, and a part that is computed again."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 3)
    optimizer = sgd(body, head)
    side.begin([body, head], [optimizer])
    for step in range(STEPS):
        x, y = batch(step)
        x.requires_grad_()
        hidden: Any = checkpoint(body, x, use_reentrant=False)
        optimizer.zero_grad()
        side.backward(F.cross_entropy(head(hidden), y), optimizer, retain_graph=True)
        weight: Tensor = body[0].weight
        penalty = (weight.t() @ weight - torch.eye(6)).pow(2).mean() + hidden.pow(2).mean()
        side.backward(penalty, optimizer)
        optimizer.step()
        seen += [
            penalty.detach(),
            *(param.detach().clone() for net in (body, head) for param in net.parameters()),
        ]


def recurrent(side: Plain, seen: list[Tensor]) -> None:
    """Recurrent weights, used twice, and a metric loss of earlier embeddings."""
    torch.manual_seed(0)
    cell, head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)
    optimizer = sgd(cell, head)
    side.begin([cell, head], [optimizer])
    for step in range(STEPS):
        x, y = batch(step)
        one, _ = cell(x[:, None].repeat(1, 2, 1))
        two, _ = cell(x[:, None].roll(1, 0))
        optimizer.zero_grad()
        side.backward(F.cross_entropy(head(one[:, -1]), y), optimizer, retain_graph=True)
        near = F.triplet_margin_loss(one[:, -1], two[:, -1], one[:, -1].roll(1, 0))
        side.backward(near + F.cosine_embedding_loss(one[:, 0], two[:, 0], torch.ones(4)), optimizer)
        optimizer.step()
        seen += [
            near.detach(),
            *(param.detach().clone() for net in (cell, head) for param in net.parameters()),
        ]


def functions(side: Plain, seen: list[Tensor]) -> None:
    """No module at all."""
    torch.manual_seed(0)
    weight, bias = torch.randn(6, 3, requires_grad=True), torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], lr=0.1)
    side.begin([], [optimizer])
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(x @ weight + bias, y)
        optimizer.zero_grad()
        side.backward(loss, optimizer)
        optimizer.step()
        seen += [loss.detach(), weight.detach().clone(), bias.detach().clone()]


SITUATIONS = [
    *(two_losses, gradient_penalty, gan, metrics, accumulation, closure, evaluation, distillation, penalties),
    *(recurrent, functions),
]


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda one: one.__name__)
def test_it_trains_as_with_apex_by_hand(
    behind: Any, monkeypatch: pytest.MonkeyPatch, level: str, situation: Callable[[Plain, list[Tensor]], None]
) -> None:
    from ampcompare.apex import amp

    expected: list[Tensor] = []
    ours: list[Tensor] = []
    situation(ByHand(amp, level), expected)
    amp._amp_state.close()
    # as a file without that word
    monkeypatch.setattr(plain_script, "_may_user_code_use_amp", lambda: False)
    behind(f"{level},loss_scale=128")
    situation(Plain(), ours)
    assert [tuple(one.shape) for one in ours] == [tuple(one.shape) for one in expected]
    wrong = [index for index, pair in enumerate(zip(ours, expected, strict=True)) if not has_bits(*pair)]
    assert not wrong, f"{len(wrong)} of {len(ours)} tensors, the first ones {wrong[:5]}"


class Products(Dataset[Tensor]):
    """Computes what it returns."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return batch(index)[0] @ torch.ones(6, 6)


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.integration)])
def test_loaders_compute_as_written(behind: Any, workers: int) -> None:
    """What they hold is on the CPU, which Apex leaves alone; between batches all is cast."""
    behind("O1")
    model = network()
    optimizer = sgd(model)
    model(batch(0)[0])
    kinds = [(x.dtype, product()) for x in DataLoader(Products(), num_workers=workers)]
    assert kinds == [(torch.float32, torch.float16)] * 2
    del optimizer


def test_a_step_computes_as_written(behind: Any) -> None:
    """In fp32, and what follows it is cast again."""
    kinds = []

    class Whitened(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            kinds.append(product())
            super().step()

    behind("O1,loss_scale=128")
    model = network()
    optimizer = Whitened(model.parameters(), lr=0.1)
    for step in range(2):
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        assert product() is torch.float16
    assert set(kinds) == {torch.float32}


@pytest.mark.parametrize("names_it", [False, True])
def test_blocks_of_the_script_end_the_casts_around_them(
    behind: Any, monkeypatch: pytest.MonkeyPatch, names_it: bool
) -> None:
    """They begin with the optimizer or with a first forward pass; once the script has a block, it alone casts."""
    monkeypatch.setattr(plain_script, "_may_user_code_use_amp", lambda: names_it)
    behind("O4")
    model = network()
    optimizer = sgd(model)
    assert product() is (torch.float32 if names_it else torch.bfloat16)
    with torch.no_grad():
        model(batch(0)[0])
    assert product() is torch.bfloat16
    for step in range(2):
        x, y = batch(step)
        with torch.autocast("cpu", enabled=False):
            assert product() is torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert product() is torch.bfloat16
            loss = F.cross_entropy(model(x), y)
        assert product() is torch.float32
        loss.backward()
        optimizer.step()
        assert product() is torch.float32
        assert [one.dtype for one in DataLoader(Products())] == [torch.float32] * 2


TEXTS = {"": "float16", "# amp = 1\n": "float32", "import helper\n": "float32"}


@pytest.mark.integration
@pytest.mark.parametrize("head", TEXTS)
def test_casts_begin_with_the_optimizer_of_a_script_that_names_no_mixed_precision(
    legacy: Any, write: Any, head: str
) -> None:
    write("helper.py", "from torch import autocast\n")
    path = write(
        "train.py",
        f"{head}import torch\nfrom torch import nn\nmodel = nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nx = torch.ones(4, 2) @ torch.ones(2, 2)\n"
        "print(x.dtype)\nmodel(x.float()).mean().backward()\noptimizer.step()\nprint((x @ x.t()).dtype)\n",
    )
    done = legacy("--arm", "O1", path.name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"torch.{TEXTS[head]}", "torch.float16"]


def test_an_embedding_bag_with_weights_of_another_type_is_explained(behind: Any) -> None:
    """Its weights per sample come from a layer, in the arm's type; torch says so in words of its own."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.bag = nn.Linear(6, 2), nn.EmbeddingBag(4, 3, mode="sum")

        def forward(self, x: Any) -> Any:
            ids = torch.tensor([[0, 1]]).repeat(len(x), 1)
            return self.bag(ids, per_sample_weights=self.score(x))

    stand_in = behind("native:bf16")
    model = Weighted()
    optimizer = sgd(model)  # kept: a model is known by its optimizer
    with pytest.raises(RuntimeError, match="to have the same type") as caught:
        model(batch(0)[0])
    assert optimizer.param_groups
    explained = stand_in.find_refusal_of_error(caught.value)
    assert explained is not None
    assert "computes with both types, which torch.autocast does not cast" in str(explained)


def test_advice_where_code_of_torch_mixes_types_names_the_module(behind: Any) -> None:
    """No line of the script could be changed; with that module in fp32 it trains."""

    def first_step(arm: str) -> None:
        stand_in = behind(arm)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)))
        optimizer = sgd(model)
        x, y = batch(0)
        try:
            F.cross_entropy(model(x), y).backward()
        except RuntimeError as error:
            explained = stand_in.find_refusal_of_error(error)
            assert explained is not None
            raise explained from error
        optimizer.step()

    with pytest.raises(
        UnsupportedCombination,
        match=r"code of torch itself in 1 .*; compare apex:O1,keep_fp32=1 or native:fp16",
    ):
        first_step("O1")
    behind.end()
    first_step("O1,keep_fp32=1")
