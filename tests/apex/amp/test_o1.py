"""O1's casts: what Apex's own tests assert, the weight cache, recurrent modules, registration, threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from ampcompare.apex import amp

HALF, FLOAT = torch.float16, torch.float32
DTYPES = [HALF, FLOAT]


@pytest.fixture
def handle() -> Any:
    """O1's patches, without models."""
    return amp.init()


def check(function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], expected: Any) -> None:
    """Check result dtype and gradient dtype for half and float inputs; `expected` None means that of the input."""
    for dtype in DTYPES:
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        y = function(x)
        assert y.dtype == (expected or dtype)
        y.float().sum().backward()
        assert x.grad.dtype == dtype


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Any]] = {
    "linear": (lambda: nn.Linear(4, 4), (3, 4), HALF),
    "conv2d": (lambda: nn.Conv2d(2, 2, 3, padding=1), (2, 2, 5, 5), HALF),
    "softmax": (lambda: nn.Softmax(dim=-1), (3, 4), FLOAT),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3), FLOAT),
    "layer_norm": (lambda: nn.LayerNorm(4), (3, 4), FLOAT),
    "relu": (lambda: nn.ReLU(), (3, 4), None),
    "batch_norm": (lambda: nn.BatchNorm2d(4), (2, 4, 3, 3), None),
    "batch_norm_eval": (lambda: nn.BatchNorm2d(4).eval(), (2, 4, 3, 3), None),
}


@pytest.mark.parametrize("make, shape, expected", MODULES.values(), ids=MODULES)
def test_modules(handle: Any, make: Callable[[], nn.Module], shape: tuple[int, ...], expected: Any) -> None:
    """Modules give half, float, or the dtype of their input, for several calls with one weight."""
    module = make()
    check(module, shape, expected)
    check(module, shape, expected)


@pytest.mark.parametrize("function, expected", [
    (lambda x: F.softmax(x, dim=-1), FLOAT),
    (lambda x: F.mse_loss(x, torch.zeros_like(x)), FLOAT),
    (lambda x: nn.MSELoss()(x, torch.zeros_like(x)), FLOAT),
    (lambda x: F.relu(x), None),
    (lambda x: x.matmul(torch.ones(4, 4)), HALF),
    (lambda x: x @ torch.ones(4, 4), HALF),
    (lambda x: torch.ones(4, 4).half() @ x, HALF),
    (lambda x: torch.ones(4, 4) @ x, HALF),
    (lambda x: x.pow(2.0), FLOAT),
    (lambda x: x**2.0, FLOAT),
    (lambda x: x.sum(), FLOAT),
    (lambda x: x.cpu(), FLOAT),
    (lambda x: torch.bmm(x[None], torch.ones(1, 4, 4)), HALF),
])  # fmt: skip
def test_functions(handle: Any, function: Callable[[torch.Tensor], torch.Tensor], expected: Any) -> None:
    """Functions, methods and operators give the dtype of their list."""
    check(function, (4, 4), expected)


@pytest.mark.parametrize("function", [torch.mul, torch.atan2, torch.Tensor.mul, torch.Tensor.atan2, torch.add])
def test_promotion(handle: Any, function: Any) -> None:
    """Functions of two tensors give the wider of half and float, and gradients keep the dtype of their input."""
    function = getattr(torch if not hasattr(function, "__objclass__") else torch.Tensor, function.__name__)
    for left in DTYPES:
        for right in DTYPES:
            x = torch.rand(4, dtype=left, requires_grad=True)
            y = function(x, torch.rand(4, dtype=right))
            assert y.dtype == (FLOAT if FLOAT in (left, right) else HALF)
            y.float().sum().backward()
            assert x.grad.dtype == left


def test_operators_by_their_methods(handle: Any) -> None:
    """Methods such as `__add__` promote what they get by name, too: float and half give float, as with Apex 25.05."""
    half, full = torch.full((2,), 0.5, dtype=HALF), torch.ones(2)
    assert half.__add__(other=full).dtype == full.__mul__(other=half).dtype == FLOAT
    assert half.__sub__(other=half).dtype == HALF
    assert full.__eq__(other=half).tolist() == [False, False]


def test_other_mixes_are_refused(handle: Any) -> None:
    """Float with double, and half with bfloat16, raise NotImplementedError that names the types."""
    with pytest.raises(NotImplementedError, match="float32 and float64"):
        _ = torch.ones(2) + torch.ones(2).double()
    with pytest.raises(NotImplementedError, match="bfloat16 and float16"):
        torch.mul(torch.ones(2).half(), torch.ones(2).bfloat16())
    assert (torch.ones(2).half() + torch.ones(2, dtype=torch.int64)).dtype == HALF


def test_cat_and_stack(handle: Any) -> None:
    """Sequences promote half to float; other mixes follow torch; the sequence may come by keyword (deviation 17)."""
    h, f = torch.ones(2).half(), torch.ones(2)
    assert torch.cat([h, h, f]).dtype == FLOAT
    assert torch.cat([h, h]).dtype == HALF
    assert torch.stack((h, f), dim=1).dtype == FLOAT
    assert torch.cat([h, f.double()]).dtype == torch.float64
    assert torch.cat(tensors=[h, f], dim=0).dtype == FLOAT
    with pytest.raises(TypeError):
        torch.cat()


def test_cat_by_keyword_strict() -> None:
    """In strict mode the sequence must be positional, as in Apex."""
    amp._amp_state.strict = True
    amp.init()
    with pytest.raises(TypeError):
        torch.cat(tensors=[torch.ones(1)])


def test_in_place(handle: Any) -> None:
    """exp_ refuses half, add_ keeps the dtype of its tensor and its gradients."""
    torch.rand(2).exp_()
    with pytest.raises(NotImplementedError, match="exp_"):
        torch.rand(2).half().exp_()
    with pytest.raises(NotImplementedError, match="exp_"):
        torch.exp_(torch.rand(2).half())
    for left in DTYPES:
        for right in DTYPES:
            leaf, other = torch.ones(2, dtype=left, requires_grad=True), torch.ones(2, dtype=right)
            x = leaf.clone()
            x.add_(other, alpha=2)
            assert x.dtype == left
            assert x.tolist() == [3.0, 3.0]
            x.float().sum().backward()
            assert leaf.grad.tolist() == [1.0, 1.0]
    with pytest.raises(TypeError):
        torch.Tensor.add_(torch.ones(2))


def test_augmented_operators(handle: Any) -> None:
    """`half += float` rebinds to float; `float += half` and `half **= 2` behave as in Apex."""
    h, f = torch.ones(2).half(), torch.ones(2)
    a = h
    a += f
    assert a.dtype == FLOAT
    assert a is not h
    b = f
    b += h
    assert b is f
    c = h
    c **= 2
    assert c.dtype == FLOAT


def test_bce_is_banned_on_half(handle: Any) -> None:
    """nn.BCELoss and F.binary_cross_entropy raise on half with advice, also where casts are off; float is fine."""
    p, y = torch.rand(4), torch.ones(4)
    assert F.binary_cross_entropy(p, y).dtype == FLOAT
    for loss in (nn.BCELoss(), F.binary_cross_entropy):
        with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
            loss(p.half(), y)
    with amp.disable_casts(), pytest.raises(NotImplementedError):
        F.binary_cross_entropy(p.half(), y)


def test_bce_with_allow_banned() -> None:
    """With allow_banned the loss runs in float."""
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(torch.rand(4).half(), torch.ones(4).half()).dtype == FLOAT


def test_containers(handle: Any) -> None:
    """Containers are cast when they hold floating tensors only, named tuples and lists of parameters included."""
    from collections import namedtuple

    seen: list[Any] = []
    pair = namedtuple("pair", "a b")
    module = type("module", (), {"f": staticmethod(lambda *args: seen.extend(args))})
    amp._amp_state.close()
    amp.register_half_function(module, "f")
    amp.init()
    t = torch.ones(2)
    for _ in range(2):
        seen.clear()
        module.f([t, t.double()], [t, 2], pair(t, t), [nn.Parameter(t), nn.Parameter(t)], (), {"k": t})
    assert [x.dtype for x in seen[0]] == [HALF, HALF]
    assert seen[1][0].dtype == FLOAT
    assert type(seen[2]) is pair
    assert seen[2].b.dtype == HALF
    assert [x.dtype for x in seen[3]] == [HALF, HALF]
    assert seen[4] == ()
    assert seen[5]["k"].dtype == FLOAT


@pytest.mark.parametrize("strict", [False, True])
def test_out_argument(strict: bool) -> None:
    """An `out` tensor receives the result in its own dtype; in strict mode it stays unwritten (deviation 17)."""
    amp._amp_state.strict = strict
    amp.init()
    out = torch.zeros(2, 2)
    result = torch.mm(torch.eye(2), torch.eye(2), out=out)
    assert torch.equal(out, torch.zeros(2, 2) if strict else torch.eye(2))
    assert (result is out) is not strict
    exponents = torch.zeros(2)
    if not strict:
        torch.exp(torch.zeros(2).half(), out=exponents)
        assert exponents.tolist() == [1.0, 1.0]


class Repeated(nn.Module):
    """Uses its weight twice in one forward pass."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, 64).reshape(8, 8).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.weight
        if self.kind == "half":
            return (x.mm(w)).mm(w).sum()
        if self.kind == "float":
            return (x + torch.pow(w, 2) + torch.pow(w, 2)).sum()
        return ((x * w) * w).sum()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["half", "float", "promote"])
def test_cache(kind: str, dtype: torch.dtype) -> None:
    """Training, evaluation and training again give one gradient, right for the weights of the moment."""
    amp._amp_state.allow_incoming_model_not_fp32 = True
    model = Repeated(kind, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    x = torch.ones(8, 8)

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        with amp.scale_loss(model(x), optimizer) as scaled:
            scaled.backward()
            amp._amp_state.loss_scalers[0]._loss_scale = 4.0
        return model.weight.grad

    def reference() -> torch.Tensor:
        with amp.disable_casts():
            w = model.weight.detach().float().requires_grad_()
            if kind == "half":
                loss = x.mm(w).mm(w).sum()
            elif kind == "float":
                loss = (x + w * w + w * w).sum()
            else:
                loss = (x * w * w).sum()
            loss.backward()
            return w.grad

    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    for _ in range(2):
        grad = train()
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.float(), reference(), rtol=2e-2, atol=2e-2)
        with torch.no_grad():
            model(x)
            model.weight.mul_(0.5)
    assert not amp._amp_state.handle.cache


def weights() -> tuple[nn.Linear, torch.Tensor]:
    return nn.Linear(4, 4, bias=False), torch.eye(4)


@pytest.mark.parametrize("strict", [False, True])
def test_stale_casts_after_loading(strict: bool) -> None:
    """Weights that were loaded are used; in strict mode evaluation keeps the old casts (deviation 16)."""
    model, x = weights()
    amp.initialize(model, opt_level="O1", verbosity=0, strict=strict)
    state = {"weight": torch.full((4, 4), 3.0)}
    for grad_mode in (False, True):
        with torch.set_grad_enabled(grad_mode):
            with torch.no_grad():
                model.weight.fill_(1.0)
            amp._amp_state.handle._clear_cache()
            model(x)
            model.load_state_dict(state)
            assert model(x).mean().item() == (1.0 if strict else 3.0)


def test_averaged_weights_are_used_in_evaluation(handle: Any) -> None:
    """Weights swapped in through `.data` take effect at once under no_grad, and so does a replaced `.data`."""
    model, x = weights()
    with torch.no_grad():
        for value in (1.0, 2.0):
            model.weight.data.copy_(torch.full((4, 4), value))
            assert model(x).mean().item() == value
            model.weight.data = torch.full((4, 4), value + 0.5)
            assert model(x).mean().item() == value + 0.5
    model(x)
    model.weight.data = torch.full((4, 4), 4.0)
    assert model(x).mean().item() == 4.0


def test_training_without_scale_loss_sees_new_weights() -> None:
    """An optimizer step drops the casts of the weights, also for scripts that never call scale_loss."""
    model, x = weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    model(x).sum().backward()
    before = model(x).detach()
    optimizer.step()
    assert not torch.equal(model(x), before)


def test_frozen_then_trained_weight(handle: Any) -> None:
    """A cast made while the weight was frozen, or under no_grad, is not reused for training."""
    model, x = weights()
    model.weight.requires_grad_(False)
    model(x)
    model.weight.requires_grad_(True)
    model(x).sum().backward()
    assert model.weight.grad is not None


def test_remove_cache_and_no_caching() -> None:
    """One cast can be forgotten; `enable_caching=False` keeps none."""
    model, x = weights()
    handle = amp.init()
    model(x)
    assert handle.has_cache
    assert len(handle.cache) == 1
    handle.remove_cache(model.weight)
    assert not handle.cache
    amp._amp_state.close()
    handle = amp.init(enable_caching=False)
    model(x)
    assert not handle.has_cache
    assert not handle.cache


def test_a_cast_that_lost_its_parameter_is_refused(handle: Any) -> None:
    """A cached cast whose gradient would miss the parameter raises RuntimeError."""
    model, x = weights()
    other = nn.Parameter(torch.ones(4, 4))
    model(x)
    key = id(model.weight)
    weight, _, version, address = handle.cache[key]
    handle.cache[key] = (weight, other.half(), version, address)
    with pytest.raises(RuntimeError, match="_clear_cache"):
        model(x)


CELLS = [nn.RNNCell, nn.GRUCell, nn.LSTMCell]


@pytest.mark.parametrize("cell", CELLS)
def test_cells(handle: Any, cell: Any) -> None:
    """Cells give half at each of ten steps for half and float inputs, and input gradients keep their dtype."""
    for dtype in DTYPES:
        module = cell(4, 6)
        x = torch.randn(10, 3, 4, dtype=dtype, requires_grad=True)
        hidden: Any = torch.zeros(3, 6, dtype=dtype)
        if cell is nn.LSTMCell:
            hidden = (hidden, hidden)
        for t in range(10):
            hidden = module(x[t], hidden)
            out = hidden[0] if cell is nn.LSTMCell else hidden
            assert out.dtype == HALF
        out.float().sum().backward()
        assert x.grad.dtype == dtype
        assert module.weight_ih.grad.dtype == FLOAT


@pytest.mark.parametrize("layers, bidirectional", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_modules(handle: Any, kind: Any, layers: int, bidirectional: bool) -> None:
    """Recurrent modules give half output and state for both input dtypes, and gradients reach weights and input."""
    for dtype in DTYPES:
        module = kind(4, 6, num_layers=layers, bidirectional=bidirectional)
        x = torch.randn(5, 3, 4, dtype=dtype, requires_grad=True)
        out, state = module(x)
        assert out.dtype == HALF
        assert all(s.dtype == HALF for s in (state if isinstance(state, tuple) else (state,)))
        out[-1].float().sum().backward()
        assert x.grad.dtype == dtype
        assert all(p.grad is not None and p.grad.dtype == FLOAT for p in module.parameters())


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_packed_sequences(handle: Any, kind: Any) -> None:
    """A packed sequence comes out half."""
    module = kind(4, 6, num_layers=2)
    packed = pack_padded_sequence(torch.randn(5, 3, 4), torch.tensor([5, 3, 2]))
    out, _ = module(packed)
    assert out.data.dtype == HALF
    module(pack_padded_sequence(torch.randn(5, 3, 4).half(), torch.tensor([5, 3, 2])))


def test_recurrent_modules_still_check_shapes(handle: Any) -> None:
    """A wrong input size is refused as without amp, and dtypes are checked again where casts are off."""
    module = nn.LSTM(4, 6)
    with pytest.raises(RuntimeError, match="input"):
        module(torch.randn(5, 3, 7).half())
    with amp.disable_casts(), pytest.raises(ValueError, match="type"):
        module(torch.randn(5, 3, 4).half())


def test_recurrent_module_works_twice(handle: Any) -> None:
    """A second forward before the backward pass, and a pickled module afterwards, are fine."""
    module = nn.LSTM(4, 6)
    x = torch.randn(5, 3, 4)
    (module(x)[0].float().sum() + module(x)[0].float().sum()).backward()
    copy.deepcopy(module)(x)


def test_deactivate_restores_torch() -> None:
    """Taking patches back leaves every function and method as it was, registered and listed ones included."""
    from torch.nn.modules import rnn

    names = [(F, "linear"), (torch, "mm"), (torch, "sum"), (torch, "cat"), (rnn.RNNBase, "check_input")]
    before = [getattr(module, name) for module, name in names]
    own_names = {name for name in vars(torch.Tensor) if not name.startswith("_cls")}
    amp.register_float_function(torch, "sum")
    amp.register_promote_function(torch, "mm")
    handle = amp.init()
    assert torch.sum is not before[2]
    handle._deactivate()
    assert [getattr(module, name) for module, name in names] == before
    assert {name for name in vars(torch.Tensor) if not name.startswith("_cls")} == own_names
    assert torch.mm(torch.eye(2), torch.eye(2)).dtype == FLOAT


def test_init_twice() -> None:
    """A second init replaces the first one's patches and keeps its registered functions; strict mode stacks."""
    original = torch.mm
    amp.register_float_function(torch, "relu")
    amp.init()
    handle = amp.init()
    assert torch.relu(torch.ones(1).half()).dtype == FLOAT
    handle._deactivate()
    assert torch.mm is original
    amp._amp_state.close()
    amp._amp_state.strict = True
    first = amp.init()
    second = amp.init()
    second._deactivate()
    assert torch.mm is not original
    first._deactivate()
    assert torch.mm is original


def test_disabled_handle() -> None:
    """init(enabled=False) patches nothing and returns a handle that does nothing."""
    original = torch.mm
    handle = amp.init(enabled=False)
    assert torch.mm is original
    assert not handle.is_active()
    assert not handle.has_cache
    with handle._disable_casts(), handle.scale_loss("loss", None) as loss:
        assert loss == "loss"
    handle._clear_cache()
    handle._deactivate()


def test_a_disabled_init_stops_decorated_functions(handle: Any) -> None:
    """After init(enabled=False) decorated functions run as they are, and torch stays patched, as with Apex 25.05."""
    doubled = amp.half_function(lambda value: value * 2)
    assert doubled(torch.ones(2)).dtype == HALF
    amp.init(enabled=False)
    assert doubled(torch.ones(2)).dtype == FLOAT
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == HALF


def test_old_handle_api(handle: Any) -> None:
    """The handle's scale_loss points to the new API; wrap_optimizer passes everything on."""
    with pytest.raises(RuntimeError, match=r"amp\.initialize"):
        handle.scale_loss(torch.ones(()), None)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    wrapped = handle.wrap_optimizer(optimizer)
    assert wrapped.param_groups is optimizer.param_groups
    wrapped.step()
    with pytest.raises(RuntimeError):
        wrapped.scale_loss(torch.ones(()))


def test_disable_casts_nests_and_survives_exceptions(handle: Any) -> None:
    """Inner blocks leave casts off, and an exception turns them on again (deviation 13)."""
    eye = torch.eye(2)
    with amp.disable_casts():
        with amp.disable_casts():
            assert torch.mm(eye, eye).dtype == FLOAT
        assert torch.mm(eye, eye).dtype == FLOAT
    assert torch.mm(eye, eye).dtype == HALF
    with pytest.raises(ZeroDivisionError), amp.disable_casts():
        _ = 1 / 0
    assert handle.is_active()


def test_disable_casts_strict() -> None:
    """In strict mode leaving an inner block turns casts on, and an exception leaves them off."""
    amp._amp_state.strict = True
    handle = amp.init()
    with amp.disable_casts():
        with amp.disable_casts():
            pass
        assert handle.is_active()
    with pytest.raises(ZeroDivisionError), amp.disable_casts():
        _ = 1 / 0
    assert not handle.is_active()


def test_disable_casts_without_o1() -> None:
    """Without a handle disable_casts does nothing; strict mode raises AttributeError (deviation 35)."""
    with amp.disable_casts():
        pass
    amp._amp_state.strict = True
    with pytest.raises(AttributeError), amp.disable_casts():
        pass


def test_steps_run_without_casts() -> None:
    """Inside optimizer.step casts are off; an exception there turns them on again, arguments pass through."""
    seen: list[Any] = []

    class Probe(torch.optim.SGD):
        def step(self, closure: Any = None, flag: int = 0) -> Any:
            seen.append((torch.mm(torch.eye(2), torch.eye(2)).dtype, flag))
            if flag == 2:
                raise ZeroDivisionError
            return "done"

    model, _ = weights()
    optimizer = Probe(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert optimizer.step(flag=1) == "done"
    with pytest.raises(ZeroDivisionError):
        optimizer.step(flag=2)
    assert seen == [(FLOAT, 1), (FLOAT, 2)]
    assert amp._amp_state.handle.is_active()


def test_decorators() -> None:
    """Decorated functions cast while O1 is on and are plain otherwise."""
    seen: list[torch.dtype] = []

    @amp.half_function
    def to_half(x: torch.Tensor) -> None:
        seen.append(x.dtype)

    @amp.float_function
    def to_float(x: torch.Tensor) -> None:
        seen.append(x.dtype)

    @amp.promote_function
    def widest(x: torch.Tensor, y: torch.Tensor) -> None:
        seen.extend([x.dtype, y.dtype])

    def call() -> list[torch.dtype]:
        seen.clear()
        to_half(torch.ones(1))
        to_float(torch.ones(1).half())
        widest(torch.ones(1), torch.ones(1).half())
        return list(seen)

    plain = [FLOAT, HALF, FLOAT, HALF]
    assert to_half.__name__ == "to_half"
    assert call() == plain
    amp.init()
    assert call() == [HALF, FLOAT, FLOAT, FLOAT]
    with amp.disable_casts():
        assert call() == plain
    with pytest.raises(NotImplementedError):
        widest(torch.ones(1), torch.ones(1).double())


def test_decorated_autograd_functions(handle: Any) -> None:
    """Decorators work on static forward and backward methods of autograd functions."""

    class Double(torch.autograd.Function):
        @staticmethod
        @amp.half_function
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        @amp.float_function
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            assert grad.dtype == FLOAT
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    y = Double.apply(x)
    assert y.dtype == HALF
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_registered_functions() -> None:
    """Registered functions are wrapped by the next init; a missing name is a ValueError."""
    with pytest.raises(ValueError, match="nonsense"):
        amp.register_half_function(torch, "nonsense")
    amp.register_half_function(torch, "einsum")
    amp.register_float_function(torch, "sigmoid")
    amp.register_promote_function(torch, "where")
    amp.init()
    h, f = torch.ones(2).half(), torch.ones(2)
    assert torch.sigmoid(h).dtype == FLOAT
    assert torch.where(f > 0, h, f).dtype == FLOAT
    assert torch.einsum("i,i->i", f, f).dtype == HALF


def test_a_registered_function_that_is_also_listed() -> None:
    """A user's float registration of a half function computes in float on rounded arguments, as in Apex."""
    amp.register_float_function(torch, "mm")
    amp.init()
    x = torch.full((1, 1), 1.0001)
    result = torch.mm(x, torch.ones(1, 1))
    assert result.dtype == FLOAT
    assert result.item() == 1.0


def test_a_registered_class_stays_a_class() -> None:
    """Registering a class keeps it usable with isinstance."""
    amp.register_float_function(nn, "MaxPool2d")
    amp.init()
    assert isinstance(nn.MaxPool2d(2), nn.MaxPool2d)
    assert nn.MaxPool2d(2)(torch.ones(1, 1, 2, 2)).shape == (1, 1, 1, 1)


def test_lists_are_live() -> None:
    """Names removed from a list before init are not cast."""
    names = amp.lists.functional_overrides.FP32_FUNCS
    names.remove("softmax")
    try:
        amp.init()
        assert F.softmax(torch.ones(2).half(), dim=0).dtype == HALF
    finally:
        names.append("softmax")


def test_verbose_casts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """At verbosity 2 each cast is printed with the function's name."""
    model, x = weights()
    amp.initialize(model, opt_level="O1", verbosity=2)
    capsys.readouterr()
    model(x)
    assert "Float->Half (linear)" in capsys.readouterr().out


def test_patching_can_be_left_out() -> None:
    """O1 with patch_torch_functions=False only scales losses."""
    original = torch.mm
    model, x = weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", patch_torch_functions=False, verbosity=0)
    assert torch.mm is original
    with amp.scale_loss(model(x).sum(), optimizer) as scaled:
        assert scaled.dtype == FLOAT
        scaled.backward()


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_cast_to_float_runs_under_the_casts(strict: bool) -> None:
    """O1 with cast_model_type=float32 still casts inside the model; the value is the one that Apex 25.05 computed."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", cast_model_type=FLOAT, verbosity=0, strict=strict)
    inside: list[torch.dtype] = []
    model[0].register_forward_hook(lambda module, args, output: inside.append(output.dtype))
    output = model(torch.ones(1, 2))
    assert inside == [HALF]
    assert output.dtype == FLOAT
    assert output.item() == 0.84033203125


def test_threads_with_replicated_weights(handle: Any) -> None:
    """Replicas in threads, whose weights are not leaves, compute in half and send gradients to the one parameter."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    inputs = torch.randn(3, 5, 4)
    results: list[torch.Tensor | None] = [None] * 3
    replicas = []
    for _ in range(3):
        replica = copy.deepcopy(model)
        for source, target in zip(model, replica, strict=True):
            for name in list(target._parameters):
                del target._parameters[name]
                setattr(target, name, getattr(source, name) * 1.0)
        replicas.append(replica)

    def run(index: int) -> None:
        results[index] = replicas[index](inputs[index])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(r is not None and r.dtype == HALF for r in results)
    assert torch.equal(torch.stack(results), model(inputs))
    torch.stack(results).float().sum().backward()
    assert model[0].weight.grad.dtype == FLOAT


def test_double_backward(handle: Any) -> None:
    """A gradient penalty, with a second backward pass through O1's casts, works."""
    model, _ = weights()
    x = torch.randn(3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
    (grad.norm() - 1).square().backward()
    assert model.weight.grad is not None
