"""O1's casts: what Apex's own tests assert, functions, operators, containers and recurrent modules."""

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from ampcompare.apex import amp
from tests.apex.amp.o1_dtypes import DTYPES, FLOAT, HALF, weights


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


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_packed_sequences(handle: Any, kind: Any) -> None:
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
