"""A script without mixed precision trains under an arm as the same script written by hand for it, bit for bit."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

from ampcompare.base.errors import PreparationError, ScalingError, UnsupportedCombination
from ampcompare.script.recording import recorder as recording
from ampcompare.script.recording.scaled_steps import record_steps
from ampcompare.script.watch.cell_facts import CellFactsRecorder
from ampcompare.training.precision.base import owned_params
from tests.covering import covering
from tests.script.behind.test_stand_in import RecordedSteps
from tests.script.small_script import batch, network, two_networks
from tests.script.trainings import (
    Apex,
    Gan,
    Plain,
    Program,
    TorchAmp,
    assert_equal,
    has_bits,
    train,
    train_gan,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore::ampcompare.apex.DeprecatedFeatureWarning"),
]
DTYPES = {"native:fp16": torch.float16, "native:bf16": torch.bfloat16}


PROGRAMS = [
    Program(early=True),
    Program(early=True, micro=3, delay=True, clip="master"),
    Program(early=True, optimizer="groups", clip="master", overflow_at=1, schedule=True),
    Program(early=True, micro=2, delay=True, overflow_at=0, evaluate=True),
    Program(early=True, closure=True, overflow_at=2),
]


def nothing(side: Any) -> None:
    """See nothing: a plain script has no scale."""


def loss_of(model: Callable[[Tensor], Tensor]) -> Tensor:
    x, y = batch(0)
    return nn.functional.cross_entropy(model(x), y)


def assert_as_in_fp32(
    behind: Any, arm: str, train: Callable[[], list[Tensor]], *, rtol: float, atol: float
) -> None:
    """Check that a script computes nearly the same under an arm and in fp32."""
    computed = []
    for name in (arm, "fp32"):
        behind(name)
        torch.manual_seed(0)
        computed.append(train())
        behind.end()
    for ours, expected in zip(*computed, strict=True):
        torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
@pytest.mark.parametrize("arm", ["fp32", "native:fp16", "native:bf16"])
def test_a_plain_script_trains_as_with_torch_amp_by_hand(behind: Any, arm: str, program: Program) -> None:
    if arm != "native:fp16":
        program = replace(program, overflow_at=-1)
    expected = train(program, lambda: TorchAmp(DTYPES.get(arm), whole=False), nothing)
    behind(arm)
    assert_equal(train(program, Plain, nothing), expected)


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
def test_a_plain_script_trains_as_with_apex_by_hand(behind: Any, level: str, program: Program) -> None:
    """Casts, loss scale, skipped steps and master weights are those of the engine."""
    from ampcompare.apex import amp

    if level not in ("O1", "O2"):
        program = replace(program, overflow_at=-1)
    expected = train(program, lambda: Apex(amp, level), nothing)
    behind(level)
    assert_equal(train(program, Plain, nothing), expected)


def test_an_overflow_that_no_scale_skips_is_an_error_of_clipping(behind: Any) -> None:
    """As the script asks for; a dynamic scale skips the step."""
    behind("apex:O2,loss_scale=128")
    with pytest.raises(RuntimeError, match="non-finite"):
        train(Program(early=True, clip="master", overflow_at=1), Plain, nothing)


def test_two_optimizers_take_turns(behind: Any) -> None:
    """One scale moves after each step, as by hand; the judge's gradients of the maker's loss are cleared unseen."""
    program = Gan((False,) * 5, losses=2, overflows=((1, "judge"), (2, "maker")))
    expected = train_gan(program, TorchAmp(torch.float16, whole=False), nothing)
    behind("native:fp16")
    assert_equal(train_gan(program, Plain(), nothing), expected)


SMALL = 2.0**-8  # no other gradient overflows


@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2"])
def test_gradients_that_wait_for_a_step_follow_the_scale(behind: Any, arm: str) -> None:
    """One network accumulates two batches, between which an overflow of the other halves the scale: no bit differs."""

    def trained(loss_factor: float) -> list[Tensor]:
        behind(arm)
        (one, other), (for_one, for_other) = two_networks()
        for step in range(2):
            x = batch(step)[0]
            (one(x).float().square().mean() * SMALL).backward()
            for_other.zero_grad()
            (other(x).float().square().mean() * SMALL * (1.0 if step else loss_factor)).backward()
            for_other.step()
        before = [weight.detach().clone() for weight in one.parameters()]
        for_one.step()
        after = [weight.detach().clone() for weight in one.parameters()]
        assert not any(map(torch.equal, before, after))
        behind.end()
        return after

    assert all(map(torch.equal, trained(1.0), trained(float("inf"))))


ARMS = ["native:fp16", "native:bf16", "O1", "O2", "O3", "O5", "half", "half:masters=fp32,dynamic"]


@pytest.mark.parametrize("arm", ARMS)
def test_everyday_scripts_train(behind: Any, arm: str) -> None:
    """Two losses of one graph, averages of weights, a checkpoint, gradients of an input, parts that are called."""
    behind(arm)
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(6, 16), nn.ReLU()), nn.Linear(16, 3)
    model = nn.Sequential(body, head)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    copied = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        x, y = batch(0)
        x.requires_grad_()
        hidden = checkpoint(body, x, use_reentrant=False)
        first, second = nn.functional.cross_entropy(head(hidden), y), hidden.float().square().mean()
        optimizer.zero_grad()
        first.backward(retain_graph=True)
        (second * 0.01).backward()
        assert 0 < x.grad.float().norm() < 10, f"{step}: the gradient of an input is a true one"
        assert 0 < sum(float(p.grad.float().norm()) for p in model.parameters() if p.grad is not None) < 100
        optimizer.step()
        averaged.update_parameters(model)
        with torch.no_grad():
            for mean, param in zip(copied.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(param, alpha=0.1)
            averaged(batch(0)[0])
        losses.append(first.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("arm", ["fp32", "native:bf16", "O3", "half:bf16"])
def test_lbfgs_runs_where_nothing_is_scaled(behind: Any, arm: str) -> None:
    """Its closure runs several times in a step, of which one loss is recorded; other arms refuse it at the step."""

    def train() -> float:
        model = network()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)][-1]

    behind(arm)
    assert train() < 2


def test_lbfgs_is_refused_where_steps_may_be_skipped(behind: Any) -> None:
    behind("native:fp16")
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(
        UnsupportedCombination, match=r"test_plain_script\.py:\d+: LBFGS runs its closure several times"
    ):
        optimizer.step(lambda: loss_of(model))


@pytest.mark.parametrize("arm", ["fp32", "native:bf16", "native:fp16", "O1"])
def test_first_weights_of_a_step_with_a_closure(arm: str, behind: Any) -> None:
    """Those before the step are noted, though the arm acts first inside of it."""
    model = network()
    first = [param.detach().clone() for param in model.parameters()]
    noted: list[list[Tensor]] = []
    stand_in = behind(arm)
    stand_in._watch = SimpleNamespace(
        record_first_weights=lambda _models, optimizers: noted.append(
            [param for one in optimizers for param in map(torch.clone, owned_params(one))]
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        loss = loss_of(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(noted) == 1
    assert all(map(torch.equal, noted[0], first))


@pytest.mark.parametrize("arm", ["native:bf16", "native:fp16", "O1", "O2", "half", "closure"])
def test_an_arm_without_effect_ends_at_the_first_step(behind: Any, arm: str) -> None:
    """A script without any module has nothing that could be cast; an arm that scales nothing looks behind a closure."""
    behind("native:bf16" if arm == "closure" else arm)
    weight = torch.ones(6, 3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def backward() -> Tensor:
        loss = (batch(0)[0] @ weight).square().mean()
        loss.backward()
        return loss

    if arm != "closure":
        backward()
    with pytest.raises(
        UnsupportedCombination, match=r"test_plain_script\.py:\d+: the first step comes before any"
    ):
        optimizer.step(backward if arm == "closure" else None)


@pytest.mark.parametrize("arm", ["native:bf16", "O1", "O2"])
def test_weights_in_float64(behind: Any, arm: str) -> None:
    """No arm acts on them as it says, so it ends at the first forward pass."""
    model = network().double()
    behind(arm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        UnsupportedCombination, match=r"test_plain_script\.py:\d+: the script holds .* in float64"
    ):
        model(batch(0)[0].double())
    del optimizer


def test_gradients_that_the_script_sets_itself(behind: Any) -> None:
    """They are true ones, so the step is as written; master weights lack them."""
    for arm in ("native:fp16", "O1", "O2"):
        behind_arm = behind(arm)
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = [param.detach().clone() for param in model.parameters()]
        params = list(model.parameters())
        grads = torch.autograd.grad(loss_of(model), params)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        if arm == "O2":
            with pytest.raises(ScalingError, match="sets gradients itself"):
                optimizer.step()
        else:
            optimizer.step()
            moved = [a - b.detach() for a, b in zip(before, params, strict=True)]
            assert all(torch.allclose(m, 0.1 * g, atol=1e-6) for m, g in itertools.zip_longest(moved, grads))
        behind_arm.end()
        behind.end()


@pytest.mark.parametrize("arm", ["half:bf16,masters=fp32", "native:bf16,weights=bf16,masters=fp32"])
def test_a_second_step_by_the_same_gradients(behind: Any, arm: str) -> None:
    """Masters move by steps that follow a backward pass alone, so it is refused, and not lost."""
    behind(arm)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    with pytest.raises(ScalingError, match="steps fp32 copies of the weights"):
        optimizer.step()


@pytest.mark.parametrize("arm", ["fp32", "native:fp16", "native:bf16", "O1", "O4"])
def test_losses_with_a_gradient_of_their_own(behind: Any, arm: str) -> None:
    behind(arm)
    weights = []
    for is_sum in (True, False):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = batch(0)
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        if is_sum:
            (losses * torch.full_like(losses, 0.25)).sum().backward()
        else:
            losses.backward(torch.full_like(losses, 0.25))
        optimizer.step()
        weights.append([param.detach().clone() for param in model.parameters()])
    assert all(map(has_bits, *weights))


def test_two_optimizers_of_one_weight(behind: Any) -> None:
    """Each would have masters of its own; one that the script has replaced does not count."""
    behind("O2")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(batch(0)[0])
    behind.end()
    behind("O2")
    model = network()
    inner, outer = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(PreparationError, match="two optimizers hold the same weights"):
        model(batch(0)[0])
    del optimizer, inner, outer


@pytest.mark.parametrize("arm", ["fp32", "native:bf16", "native:fp16", "apex:O1"])
def test_gradients_of_each_sample(behind: Any, arm: str) -> None:
    """`functional_call` under `vmap(grad(...))` trains under an arm, which acts, and its losses are recorded."""
    rows = RecordedSteps()
    stand_in = behind(arm, rows)
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds: set[torch.dtype] = set()
    model.register_forward_hook(lambda _module, _inputs, output: kinds.add(output.dtype))

    def loss_of(weights: Any, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    for step in range(2):
        x, y = batch(step)
        weights = {name: param.detach() for name, param in model.named_parameters()}
        grads = vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(weights, x, y)
        for name, param in model.named_parameters():
            param.grad = grads[name].float().mean(0)
        optimizer.step()
    half = {"native:bf16": torch.bfloat16, "fp32": torch.float32}.get(arm, torch.float16)
    assert (kinds, rows.steps, stand_in.has_acted()) == ({half}, 2, True)
    assert len(rows.losses) == 2
    assert all(0.5 < float(loss) < 2.5 for loss in rows.losses)


@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2"])
def test_gradients_may_be_stepped_twice(behind: Any, arm: str) -> None:
    """As by Lightning's weight averaging, which steps once more after an epoch without a backward pass.

    Apex drops gradients of master weights after a step, so that the second one changes nothing.
    """
    behind(arm)
    model = nn.Linear(6, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = [model.weight.detach().clone()]
    model(batch(0)[0]).float().square().mean().backward()
    for _ in range(2):
        optimizer.step()
        weights.append(model.weight.detach().float().clone())
    second = torch.zeros(3, 6) if arm == "O2" else weights[1] - weights[0]
    torch.testing.assert_close(weights[2] - weights[1], second, rtol=0.05, atol=1e-3)


def test_first_weights_are_hashed_inside_of_functions_of_torch() -> None:
    """What `grad` wraps has no data to be read: the hash is that of the weights themselves, and the script goes on."""
    model = nn.Linear(6, 3)
    rows: list[dict[str, Any]] = []
    recorder = recording.Recorder(None, {})
    recorder.call_after_each_row(rows.append)
    facts = CellFactsRecorder(recorder)

    def loss_of(weights: Any, x: Tensor) -> Tensor:
        with torch.nn.utils.stateless._reparametrize_module(model, weights):
            facts.record_first_weights([model], [])
            return model(x).sum()

    weights = {name: param.detach() for name, param in model.named_parameters()}
    vmap(torch.func.grad(loss_of), in_dims=(None, 0))(weights, torch.ones(2, 6))
    facts.record_first_weights([model], [])
    inside, outside = (row["sha256"] for row in rows if row["kind"] == "weights")
    assert inside == outside
    facts.end()


def test_an_optimizer_may_have_the_stacked_weights_of_an_ensemble(behind: Any) -> None:
    """What `functional_call` puts in the place of a module's weights is trained."""
    behind("native:bf16")
    models = [nn.Linear(6, 3) for _ in range(2)]
    weights, buffers = stack_module_state(models)
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)
    base = copy.deepcopy(models[0]).to("meta")
    x = batch(0)[0]
    output = vmap(lambda w, b: functional_call(base, (w, b), (x,)))(weights, buffers)
    output.square().mean().backward()
    optimizer.step()
    assert not torch.equal(output[0], models[0](x))


def test_a_functional_call_prepares_its_model(behind: Any) -> None:
    """Weights are cast before others stand in their place, as in the inner loop of meta-learning."""
    behind("apex:O2")
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    functional_call(model, {"bias": torch.zeros(3).half()}, (batch(0)[0],))
    assert model.weight.dtype is torch.float16
    del optimizer


def test_weights_that_thaw_have_masters(behind: Any) -> None:
    """A network that is frozen while the other one takes the first step trains later, and a frozen one stays."""
    behind("apex:O2")
    (maker, judge), (first, second) = two_networks()
    start = judge.weight.detach().clone()
    for step in range(2):
        x, _ = batch(step)
        judge.requires_grad_(False)
        judge(maker(x)).square().mean().backward()
        first.step()
        first.zero_grad()
        assert torch.equal(judge.weight.detach().float(), start.half().float()) == (step == 0)
        judge.requires_grad_(True)
        judge(maker(x).detach()).square().mean().backward()
        second.step()
        second.zero_grad()
    assert not torch.equal(judge.weight.detach().float(), start.half().float())


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript(behind: Any) -> None:
    """Its weights become 16-bit, and its state dict is fp32; under O1 it would train in fp32, so it is refused."""

    def train() -> nn.Module:
        model: nn.Module = torch.jit.script(nn.Linear(6, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            x, y = batch(step)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    behind("apex:O2")
    model = train()
    assert {param.dtype for param in model.parameters()} == {torch.float16}
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    behind.end()
    behind("apex:O1")
    with pytest.raises(UnsupportedCombination, match=r"apex:O1 casts .* no effect on Linear"):
        train()


def test_a_closure_steps_after_an_evaluation_has_prepared_the_model(behind: Any) -> None:
    behind("apex:O2")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(batch(0)[0])
    before = [param.detach().clone() for param in model.parameters()]

    def closure() -> Tensor:
        loss = nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1])
        loss.backward()
        return loss

    optimizer.step(closure)
    assert not all(map(torch.equal, before, model.parameters()))


def fisher(model: nn.Module, factor: float) -> list[Tensor]:
    """Return the mean squares of the gradients of single samples, as for elastic weight consolidation."""
    x, y = batch(0)
    sums = [torch.zeros(param.shape) for param in model.parameters()]
    for one, label in zip(x[:4], y[:4], strict=True):
        model.zero_grad()
        (nn.functional.cross_entropy(model(one[None]), label[None]) * factor).backward()
        for total, param in zip(sums, model.parameters(), strict=True):
            assert param.grad is not None
            total += param.grad.detach().float() ** 2 / 4
    return sums


@pytest.mark.parametrize("factor", [1.0, 64.0])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2", "half:masters=fp32,dynamic"])
def test_gradients_that_are_read_and_never_stepped(
    behind: Any, arm: str, is_first: bool, factor: float
) -> None:
    """They have no scale by hand: nothing overflows, the scale stays, and the steps before and after are as without."""

    def trained(arm: str, *, reads: bool) -> tuple[list[Tensor], list[Tensor]]:
        behind(arm)
        torch.manual_seed(0)
        model, squares = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            if reads and step == (0 if is_first else 2):
                squares = fisher(model, factor)
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        behind.end()
        return squares, [param.detach().float().clone() for param in model.parameters()]

    squares, weights = trained(arm, reads=True)
    for one, expected in zip(squares, trained("fp32", reads=True)[0], strict=True):
        torch.testing.assert_close(one, expected, rtol=0.1, atol=1e-3 * factor**2)
    assert all(map(torch.equal, weights, trained(arm, reads=False)[1]))


def none_of_the_model(model: nn.Module, _optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = None


def none_of_the_groups(_model: nn.Module, optimizer: Any) -> None:
    for param in owned_params(optimizer):
        param.grad = None


def zeros_of_the_groups(_model: nn.Module, optimizer: Any) -> None:
    for param in owned_params(optimizer):
        assert param.grad is not None
        param.grad.detach_().zero_()


def other_zeros(model: nn.Module, _optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


def half_of_them(model: nn.Module, _optimizer: Any) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)


CLEAR = [
    none_of_the_model,
    none_of_the_groups,
    zeros_of_the_groups,
    other_zeros,
    half_of_them,
    lambda *_: None,
]


@covering(
    {"arm": ["native:fp16", "O1", "O2", "half:bf16,masters=fp32"], "clear": CLEAR, "reads": [False, True]}
)
def test_gradients_are_cleared_in_any_way(
    behind: Any, arm: str, clear: Callable[..., None], reads: bool
) -> None:
    """Or kept, so that those of the next steps add to them; and read between the passes of a step."""

    def trained() -> list[Tensor]:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        norms = []
        for _ in range(3):
            for _ in range(2):
                (loss_of(model) * 0.1).backward()
                if reads:
                    norms.append(sum(param.grad.float().norm() for param in model.parameters()))  # type: ignore[union-attr]
            optimizer.step()
            norms.append(sum(param.grad.float().norm() for param in model.parameters()))  # type: ignore[union-attr]
            clear(model, optimizer)
        return [*norms, *(param.detach().float() for param in model.parameters())]

    assert_as_in_fp32(behind, arm, trained, rtol=0.02, atol=4e-3)


class OwnCall(nn.Module):
    """Has a `__call__` of its own, as the modules of some libraries, and another inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, 24).reshape(6, 4))
        self.bias = nn.Parameter(torch.zeros(4))

    def __call__(self, x: Tensor) -> Any:
        return self.forward(x)

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(x @ self.weight) + self.bias


class OwnCallToo(OwnCall):
    def __init__(self) -> None:
        super().__init__()
        self.inner = OwnCall()

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.inner(x)


@pytest.mark.parametrize("kind", [OwnCall, OwnCallToo])
@pytest.mark.parametrize("arm", ["native:fp16", "native:bf16", "O1", "O2", "half:bf16,masters=fp32"])
def test_a_class_may_have_a_call_of_its_own(behind: Any, arm: str, kind: type[nn.Module]) -> None:
    """It trains as one that has none, to the bit."""

    def trained(
        call: Callable[[nn.Module], Callable[[Tensor], Tensor]], kind: type[nn.Module]
    ) -> list[Tensor]:
        behind(arm)
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            output = call(model)(batch(0)[0])
            assert output.dtype is torch.float32
            (output.square().mean() * 0.1).backward()
            optimizer.step()
        behind.end()
        return [param.detach().float() for param in model.parameters()]

    plain = type("Plain", (kind,), {"__call__": nn.Module.__call__})
    own = vars(kind)["__call__"]
    ours = trained(lambda model: model, kind)
    assert vars(kind)["__call__"] is own
    assert not torch.equal(ours[0], kind().weight)  # type: ignore[arg-type]
    for one, expected in zip(ours, trained(lambda model: model, plain), strict=True):
        assert torch.equal(one, expected)


class Outer(nn.Module):
    """A wrapper, such as one that a solver makes for each call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Adjoint(torch.autograd.Function):
    """Computes its module again in the backward pass, by another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: nn.Module, again: nn.Module, *params: Tensor) -> Any:
        ctx.again, ctx.params = again, params
        ctx.save_for_backward(x)
        with torch.no_grad():
            return first(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.again(x)
        x_grad, *others = torch.autograd.grad(y, (x, *ctx.params), grads[0])
        return x_grad, None, None, *others


@pytest.mark.parametrize("wraps_again", [False, True])
@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2", "half:bf16,masters=fp32"])
def test_a_backward_pass_may_call_a_model_again(behind: Any, arm: str, wraps_again: bool) -> None:
    """By a part of the module that the forward pass called, or by a wrapper that is new each time."""

    def trained() -> list[Tensor]:
        inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        outer = Outer(inner)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for step in range(4):
            x, y = batch(step)
            first, again = (Outer(inner), Outer(inner)) if wraps_again else (outer, inner)
            loss = nn.functional.cross_entropy(Adjoint.apply(x, first, again, *inner.parameters()), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [param.detach().float() for param in inner.parameters()]

    assert_as_in_fp32(behind, arm, trained, rtol=0.02, atol=4e-3)


def test_an_evaluation_computes_its_loss_in_fp32_under_o1(behind: Any) -> None:
    """As with Apex by hand, whose casts are on there; it sees weights that the script has written by then."""
    behind("O1")
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    with torch.no_grad():
        before = loss_of(model)
        model.weight.data.mul_(4.0)
        after = loss_of(model)
    assert before.dtype is torch.float32
    assert not torch.equal(before, after)


@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2", "half:masters=fp32,dynamic"])
def test_an_overflow_of_gradients_that_a_script_combines_skips_the_step(behind: Any, arm: str) -> None:
    """As in gradient surgery: each loss has a pass, whose gradients are read, cleared, and written in their sum."""
    behind(arm)
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moved = []
    for step in range(4):
        before = model.weight.detach().clone()
        total = [torch.zeros(param.shape) for param in model.parameters()]
        for factor in (1e4 if step == 1 else 0.1, 0.1):
            optimizer.zero_grad()
            (loss_of(model) * factor).backward()
            for one, param in zip(total, model.parameters(), strict=True):
                assert param.grad is not None
                one += param.grad
        for one, param in zip(total, model.parameters(), strict=True):
            param.grad = one.to(param.dtype)
        optimizer.step()
        moved.append(not torch.equal(before, model.weight))
    assert moved == [True, False, True, True]
    assert bool(model.weight.isfinite().all())


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # a cycle, which torch does not advise
@pytest.mark.parametrize("arm", ["native:fp16", "native:bf16", "O1", "O2", "half:bf16,masters=fp32"])
def test_gradients_have_a_graph(behind: Any, arm: str) -> None:
    """A penalty of their norm is a part of the loss."""

    def trained() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        penalties = []
        for _ in range(3):
            optimizer.zero_grad()
            (loss_of(model) * 0.1).backward(create_graph=True)
            penalty = torch.stack([param.grad.float().square().sum() for param in model.parameters()]).sum()  # type: ignore[union-attr]
            penalty.backward()
            optimizer.step()
            penalties.append(penalty.detach())
        return [*penalties, *(param.detach().float() for param in model.parameters())]

    assert_as_in_fp32(behind, arm, trained, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2", "half:masters=fp32,dynamic"])
def test_hooks_get_true_gradients(behind: Any, arm: str) -> None:
    """Those of weights, feature maps and modules; what they return is scaled, and a retained gradient is a true one."""

    def trained() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        seen: list[Tensor] = []
        model[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        model[1].register_full_backward_hook(
            lambda _module, _inputs, outputs: seen.append(outputs[0].float().norm())
        )
        model[2].register_full_backward_hook(lambda _module, inputs, _outputs: (inputs[0] * 2,))
        for _ in range(3):
            optimizer.zero_grad()
            x, y = batch(0)
            hidden = model[1](model[0](x))
            hidden.retain_grad()
            hidden.register_hook(lambda grad: seen.append(grad.float().norm()))
            nn.functional.cross_entropy(model[2](hidden), y).backward()
            assert hidden.grad is not None
            seen.append(hidden.grad.float().norm())
            optimizer.step()
        return [*seen, *(param.detach().float() for param in model.parameters())]

    assert_as_in_fp32(behind, arm, trained, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("arm", ["native:fp16", "O1", "O2"])
def test_optimizers_may_step_in_a_backward_pass(behind: Any, arm: str) -> None:
    """Each weight has its own, which steps as soon as its gradient is there."""

    def trained() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
        optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

        def step(param: Tensor) -> None:
            optimizers[param].step()  # type: ignore[index]
            optimizers[param].zero_grad()  # type: ignore[index]

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            loss_of(model).backward()
        return [param.detach().float() for param in model.parameters()]

    assert_as_in_fp32(behind, arm, trained, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("arm", ["native:fp16", "apex:O1", "apex:O2"])
def test_a_loss_that_reaches_no_weight_is_one_step(behind: Any, arm: str, tmp_path: Path) -> None:
    """As of a batch without targets: it has a gradient of its own, and the optimizer none."""
    recorder = recording.Recorder(tmp_path / "script.jsonl", {})
    recorded: list[dict[str, Any]] = []
    recorder.call_after_each_row(recorded.append)
    rows = recording.RecordedSteps(recorder)
    behind(arm, rows)
    record_steps(rows, amp=False)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for step in range(6):
        optimizer.zero_grad()
        empty = torch.zeros((), requires_grad=True)
        loss = empty if step % 3 == 1 else model(torch.ones(3, 4)).float().square().mean()
        loss.backward()
        optimizer.step()
    recorder.close(0, None)
    kinds = [row["kind"] for row in recorded if row["kind"] in ("backward", "step")]
    assert kinds == ["backward", "step"] * 6
