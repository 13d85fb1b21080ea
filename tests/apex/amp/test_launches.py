"""What a step dispatches: lists that CUDA serves with one kernel, storages that stay, and nothing that waits."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ampcompare.apex import amp, amp_C
from ampcompare.apex.amp._engine import device_skip, forward, optimizer_state
from ampcompare.apex.amp.handle import WeightCastGroups
from ampcompare.apex.optimizers import FusedAdam
from ampcompare.base.tensors.loss_scale import DeviceLossScale

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every tensor say that it is on a CUDA device."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)


class Ledger(TorchDispatchMode):
    """Writes down each dispatched operation: its name, and the lists of tensors that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.lists: list[tuple[str, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.names.append(name)
        for value in args:
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
                self.lists.append((name, list(value)))
        return func(*args, **(kwargs or {}))

    def mixed(self) -> list[str]:
        """Return the operations on lists of several dtypes, for which CUDA launches a kernel for each tensor."""
        return [name for name, tensors in self.lists if len({tensor.dtype for tensor in tensors}) > 1]


class Net(nn.Module):
    """Layers that O2 makes half, and a batch norm that it keeps."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
        self.bn = nn.BatchNorm1d(4)
        with torch.no_grad():
            for number, param in enumerate(self.layers.parameters()):
                param.copy_(torch.linspace(-0.5, 0.5 + number / 8, param.numel()).reshape(param.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.layers(x))


def loss_of(model: nn.Module) -> Tensor:
    return (model(X).float() * torch.arange(1.0, 5.0) + 1).square().mean() / 256


def train_step(model: nn.Module, optimizer: Any) -> None:
    with amp.scale_loss(loss_of(model), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


def start(level: str, *, layers: int = 1, optimizer: str = "SGD", **options: Any) -> Any:
    model = Net(layers)
    momentum_options = {"momentum": 0.9, "weight_decay": 1e-3} if optimizer == "SGD" else {}
    built = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05, **momentum_options, **options)
    return amp.initialize(model, built, opt_level=level, loss_scale="dynamic", verbosity=0)


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_list_has_one_dtype(level: str, implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operation of a step is given tensors of several dtypes, with and without host reads."""
    monkeypatch.setattr(device_skip, "_DEVICE_TYPES", frozenset({"cpu"}))
    model, optimizer = start(level, **{implementation: True})
    train_step(model, optimizer)
    with Ledger() as ledger:
        train_step(model, optimizer)
    assert ledger.mixed() == []
    assert ledger.names.count("_local_scalar_dense") == (0 if implementation == "fused" else 1)


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_short_way_of_forward_serves_cuda(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the model's device are cast without a walk through the arguments."""

    def refuse(value: Any, fn: Any) -> Any:
        raise AssertionError("the long way")

    model, _ = start(level)
    monkeypatch.setattr(forward, "applier", refuse)
    assert model(X).dtype is torch.float32
    assert model(X.half()).dtype is torch.float32


def test_a_tensor_elsewhere_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on CUDA warns about an input on the CPU, of whatever dtype."""
    model, _ = start("O2")
    model.forward.expect_cuda = True
    for value in (X, X.half()):
        with pytest.warns(UserWarning, match="is on the CPU"):
            model(value)


def test_the_scale_stays_where_it_is() -> None:
    """Scale, inverse and counter keep their storages, and what was handed out of them does not change."""
    scale = DeviceLossScale(torch.device("cpu"))
    addresses = [tensor.data_ptr() for tensor in (scale.scale, scale.inverse, scale.tracker)]
    scale.set_scale_and_good_steps(2.0**10, 0)
    initial_grad, copy = scale.initial_grad(), scale.copy()
    scale.update(torch.ones(()), 2000, None, 2.0**24)
    assert [tensor.data_ptr() for tensor in (scale.scale, scale.inverse, scale.tracker)] == addresses
    assert (scale.scale.item(), scale.inverse.item()) == (2.0**9, 2.0**-9)
    assert (initial_grad.item(), copy.item()) == (2.0**10, 2.0**10)


def test_a_graph_kept_past_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Going back again through a scaled loss after its block uses the scale of its block."""
    monkeypatch.setattr(device_skip, "_DEVICE_TYPES", frozenset({"cpu"}))
    model, optimizer = start("O1", fused=True)
    loss = loss_of(model)
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward(retain_graph=True)
    first = model.bn.weight.grad.clone()
    amp._amp_state.loss_scalers[0]._on_device.scale.fill_(2.0)
    model.bn.weight.grad = None
    scaled.backward()
    assert torch.equal(model.bn.weight.grad, first * 65536)


def test_a_gradient_that_is_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter whose gradient autograd takes from the seed leaves the loss scale alone when it is unscaled."""
    monkeypatch.setattr(device_skip, "_DEVICE_TYPES", frozenset({"cpu"}))
    param = nn.Parameter(torch.ones(1))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([param], lr=0.5, fused=True)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for step in (1, 2):
        with amp.scale_loss(param.reshape(()), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert param.item() == 1 - 0.5 * step
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 2}


@pytest.mark.parametrize("kind", ["step", "skip"])
def test_master_gradients_are_released(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an allocator keeps memory, buffers of master gradients are gone after a step, and after a skipped one."""
    monkeypatch.setattr(optimizer_state, "_CACHED_DEVICES", frozenset({"cpu"}))
    model, optimizer = start("O2")
    with amp.scale_loss(loss_of(model) * (1 if kind == "step" else float("inf")), optimizer) as scaled:
        scaled.backward()
    buffers = [weakref.ref(buffer) for buffer in optimizer._amp_stash.master_grad_buffers]
    assert buffers
    assert all(reference() is not None for reference in buffers)
    optimizer.step()
    assert all(reference() is None for reference in buffers)
    train_step(model, optimizer)


def flattened(rnn: nn.RNNBase) -> None:
    """Lay the weights out in one storage, as `flatten_parameters` does on CUDA."""
    weights = rnn._flat_weights
    flat = torch.cat([weight.detach().reshape(-1) for weight in weights])
    offset = 0
    for weight in weights:
        weight.data = flat[offset : offset + weight.numel()].view(weight.shape)
        offset += weight.numel()


def test_flattened_recurrent_weights_stay_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half weights of an RNN lie in one storage as the fp32 ones do, and give the gradients of separate casts."""
    seen: list[list[Tensor]] = []

    def gradients(flat: bool) -> list[Tensor]:
        torch.manual_seed(0)
        rnn = nn.LSTM(4, 3, num_layers=2)
        if flat:
            flattened(rnn)
        kernels: Any = vars(torch.nn.modules.rnn)["_VF"]
        original = kernels.lstm

        def lstm(*args: Any) -> Any:
            seen.append(list(args[2]))
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(kernels, "lstm", lstm)
            amp.initialize(rnn, opt_level="O1", verbosity=0)
            rnn(X.reshape(3, 1, 4))[0].float().square().sum().backward()
            amp._amp_state.close()
        return [weight.grad for weight in rnn._flat_weights]

    expected, found = gradients(False), gradients(True)
    apart, together = seen
    assert len({weight.untyped_storage().data_ptr() for weight in apart}) == len(apart)
    assert len({weight.untyped_storage().data_ptr() for weight in together}) == 1
    assert {weight.dtype for weight in together} == {torch.float16}
    assert [weight.storage_offset() for weight in together][:3] == [0, 48, 84]
    assert together[0].untyped_storage().nbytes() == 2 * sum(weight.numel() for weight in together)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("flag", [0, 1])
def test_a_legacy_sgd_call_does_not_wait(flag: int, as_on_cuda: None) -> None:
    """`amp_C.multi_tensor_sgd` hands its flag to the kernel, and a set one leaves weights and momentum alone."""
    grads, params, buffers = ([torch.full((3,), value)] for value in (1.0, 2.0, 3.0))
    rates = (0.0, 0.5, 0.0, 0.25, False, False, False, 1.0)
    with Ledger() as ledger:
        noop = torch.full((1,), flag, dtype=torch.int32)
        amp_C.multi_tensor_sgd(65536, noop, [grads, params, buffers], *rates)
    assert "_local_scalar_dense" not in ledger.names
    expected = (2.0, 3.0) if flag else (2.0 - 0.25 * 2.5, 2.5)
    assert (params[0].tolist(), buffers[0].tolist()) == ([expected[0]] * 3, [expected[1]] * 3)


def test_a_capturable_step_count_stays_where_it_is() -> None:
    """FusedAdam counts steps in one tensor for life, which a CUDA graph that recorded a step goes on counting in."""
    param = nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([param], capturable=True)
    places = set()
    for _ in range(3):
        param.grad = torch.ones(2)
        optimizer.step()
        places.add(optimizer.param_groups[0]["step"].data_ptr())
    assert len(places) == 1
    assert optimizer.param_groups[0]["step"].item() == 3


class TestCastGroups:
    """Weights cast eight by eight, as on CUDA, have the gradients of weights cast one by one."""

    @staticmethod
    def weights_after(steps: int, *, layers: int = 9) -> list[Tensor]:
        model, optimizer = start("O1", layers=layers)
        for _ in range(steps):
            train_step(model, optimizer)
        amp._amp_state.close()
        return [param.detach() for param in model.parameters()]

    def test_same_bits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Five steps give the same weights, bit for bit."""
        expected = self.weights_after(5)
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
        made: list[int] = []
        original = WeightCastGroups.cast

        def cast(self: WeightCastGroups, leader: Tensor) -> Any:
            pairs = original(self, leader)
            made.append(len(pairs))
            return pairs

        monkeypatch.setattr(WeightCastGroups, "cast", cast)
        weights = self.weights_after(5)
        # 18 weights: met one by one in the first step, then in groups of 8 and 8, and 2 alone.
        assert made == [0] * 18 + [8, 8, 0, 0] * 4
        for one, other in zip(expected, weights, strict=True):
            assert torch.equal(one, other)

    @pytest.mark.usefixtures("as_on_cuda")
    def test_kernels(self) -> None:
        """A group costs one kernel forward and one backward, and its gradients are taken without a copy."""
        model, optimizer = start("O1", layers=4)
        train_step(model, optimizer)
        loss_of(model).backward()
        amp._amp_state.handle._clear_cache()
        with Ledger() as forward:
            loss = loss_of(model)
        casts = [tensors for name, tensors in forward.lists if name == "_foreach_copy_"]
        assert [len(tensors) for tensors in casts] == [8, 8]  # targets and sources
        optimizer.zero_grad()
        with Ledger() as backward:
            loss.backward()
        assert [len(tensors) for name, tensors in backward.lists if name == "_foreach_copy_"] == [8, 8]
        assert "clone" not in backward.names

    @pytest.mark.usefixtures("as_on_cuda")
    def test_second_derivatives(self) -> None:
        """A gradient penalty goes through the casts of a group as through single ones."""

        def penalty(weights: list[Tensor]) -> list[Tensor]:
            amp._amp_state.handle._clear_cache()
            value = X
            for weight in weights:
                value = torch.nn.functional.linear(value, weight)
            (slope,) = torch.autograd.grad(value.float().square().sum(), weights[0], create_graph=True)
            return list(torch.autograd.grad(slope.square().sum(), weights))

        model, _ = start("O1", layers=4)
        weights = [layer.weight for layer in model.layers]
        expected = penalty(weights)
        for one, other in zip(expected, penalty(weights), strict=True):
            assert torch.equal(one, other)
        assert amp._amp_state.handle.groups._groups

    @pytest.mark.usefixtures("as_on_cuda")
    def test_members_that_change(self) -> None:
        """A member that was frozen, replaced or written to since it was met is cast by what it is now."""
        model, optimizer = start("O1", layers=4)
        train_step(model, optimizer)
        train_step(model, optimizer)
        layers = model.layers
        layers[1].weight.requires_grad_(False)
        layers[2].weight = nn.Parameter(torch.eye(4))
        with torch.no_grad():
            hidden = layers[0](X)
            layers[3].bias.fill_(1.0)
        loss_of(model).backward()
        assert layers[1].weight.grad is None or layers[1].weight.grad.count_nonzero() == 0
        assert layers[2].weight.grad is not None
        with torch.no_grad():
            layers[3].bias.fill_(2.0)
        model.eval()
        for layer in layers:
            expected = torch.nn.functional.linear(hidden.half(), layer.weight.half(), layer.bias.half())
            assert torch.equal(layer(hidden), expected)

    @pytest.mark.usefixtures("as_on_cuda")
    @pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
    def test_a_trace_sees_single_casts(self) -> None:
        """A traced model holds casts that a file can hold, not calls of Python."""
        model, optimizer = start("O1", layers=4)
        train_step(model, optimizer)
        assert amp._amp_state.handle.groups._groups
        traced = torch.jit.trace(model.layers, X, check_trace=False)
        assert "_CastWeightsToHalf" not in str(traced.inlined_graph)
