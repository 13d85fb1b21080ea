"""Modules that `keep_fp32` keeps: stored and computed in fp32, inside of a model in 16 bits."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from ampcompare.base.errors import ConfigError
from ampcompare.training.precision.base import Precision, make_precision

X = torch.linspace(-1, 1, 24).reshape(6, 4)
CASTING = ["half", "half:bf16", "half:masters=fp32", "apex:O2,engine=compat", "apex:O3,engine=compat"]
AROUND = ["native:bf16", "apex:O1,engine=compat"]


class Block(nn.Module):
    """A norm, a product and a residual sum, as a layer of a language model has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        self.seen = {"stream": x.dtype, "normed": normed.dtype}
        return x + self.linear(normed)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)  # type: ignore[no-any-return]


def prepared(arm: str, patterns: str, model: nn.Module | None = None) -> tuple[Precision, Any, SGD]:
    """A model under an arm that keeps some modules."""
    torch.manual_seed(0)
    model = model or Net()
    precision = make_precision(f"{arm}{',' if ':' in arm else ':'}keep_fp32={patterns}")
    (model,), (optimizer,) = precision.prepare([model], [SGD(model.parameters(), lr=0.1)])
    return precision, model, optimizer  # type: ignore[return-value]


@pytest.mark.parametrize("arm", CASTING)
def test_only_kept_modules_have_fp32_weights(arm: str) -> None:
    torch.manual_seed(0)
    before = dict(Net().named_parameters())
    precision, model, _ = prepared(arm, "*.norm|lm_head")
    model(X)
    assert precision.kept_fp32 == ("layers.0.norm", "layers.1.norm", "lm_head")
    for name, param in model.named_parameters():
        kept = "norm" in name or "lm_head" in name
        assert param.dtype is (torch.float32 if kept else precision.half_dtype), name
        if kept:
            assert torch.equal(param, before[name]), name
    assert set(model.layers[1].seen.values()) == {precision.half_dtype}


@pytest.mark.parametrize("arm", CASTING)
def test_the_output_of_the_model_is_not_rounded(arm: str) -> None:
    """A kept module at the end gives the model its fp32 result: that of its fp32 weights on the 16-bit activations."""
    precision, model, _ = prepared(arm, "lm_head")
    seen: list[Tensor] = []
    model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    with torch.no_grad():
        output = model(X)
        exact = nn.functional.linear(seen[0].float(), model.lm_head.weight, model.lm_head.bias)
    assert output.dtype is torch.float32
    assert torch.equal(output, exact)
    assert not torch.equal(output, exact.to(precision.half_dtype).float())


class WithHidden(Net):
    """Gives the last activations too, before the logits."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.layers[0](x)
        return {"hidden": hidden, "logits": self.lm_head(hidden)}


def test_logits_among_other_outputs_are_not_rounded() -> None:
    """The exact tensor is found wherever the model puts it; other outputs are what they were."""
    _, model, _ = prepared("half:bf16", "lm_head", WithHidden())
    with torch.no_grad():
        output = model(X)
    assert not torch.equal(output["logits"], output["logits"].bfloat16().float())
    assert torch.equal(output["hidden"], output["hidden"].bfloat16().float())


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["half:bf16", "native:bf16", "apex:O2,engine=compat"])
def test_a_kept_module_does_not_break_a_graph(arm: str) -> None:
    """torch.compile traces the whole model, and its result is the same."""
    precision, model, _ = prepared(arm, "2", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), precision.autocast():
        assert torch.equal(compiled(X), model(X))


@pytest.mark.parametrize("arm", AROUND)
def test_under_casts_of_functions_a_kept_module_runs_without_them(arm: str) -> None:
    """Autocast and O1 are off inside: the bits are those of fp32, where they are not for the same layer unkept."""
    precision, model, _ = prepared(
        arm, "lm_head", nn.ModuleDict({"lm_head": nn.Linear(4, 3), "other": nn.Linear(4, 3)})
    )
    with torch.no_grad(), precision.autocast():
        kept, other = model["lm_head"](X), model["other"](X)
    assert (kept.dtype, other.dtype) == (torch.float32, precision.half_dtype)
    with torch.no_grad():
        exact = nn.Linear(4, 3)
        exact.load_state_dict(model["lm_head"].state_dict())
    from ampcompare.apex.amp import _amp_state

    _amp_state.close()
    with torch.no_grad():
        assert torch.equal(kept, exact(X))


def test_a_module_that_shares_a_weight_is_kept_too() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    precision, model, _ = prepared("half:bf16", "2", model)
    assert precision.kept_fp32 == ("0", "2")
    assert model[1].weight.dtype is torch.bfloat16
    assert model(torch.arange(5)).dtype is torch.float32


def test_modules_in_a_kept_list_are_kept() -> None:
    precision, model, _ = prepared("half", "layers")
    assert precision.kept_fp32 == ("layers.0", "layers.1")
    assert {param.dtype for param in model.layers.parameters()} == {torch.float32}
    model(X)
    assert model.layers[0].seen["normed"] is torch.float32


@pytest.mark.parametrize(
    ("patterns", "near"),
    [
        ("lmhead", "near are lm_head"),
        ("*.nrm", "near are .*norm"),
        ("lm_head|layernorm", "keep_fp32=layernorm .*LayerNorm"),
    ],
)
def test_a_pattern_without_a_module_is_an_error(patterns: str, near: str) -> None:
    with pytest.raises(ConfigError, match=near) as caught:
        prepared("half", patterns)
    assert "\n" not in str(caught.value)


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("arm", [*CASTING, "native:bf16"])
@pytest.mark.parametrize("twice", [copy.deepcopy, _saved_and_loaded])
def test_a_copy_runs_its_own_weights(arm: str, twice: Callable[[Any], Any]) -> None:
    """A model that was copied or pickled keeps its modules in fp32, and no longer looks at the first one."""
    precision, model, _ = prepared(arm, "lm_head")
    other = twice(model)
    with torch.no_grad(), precision.autocast():
        expected = model(X)
        model.lm_head.weight.zero_()
        assert torch.equal(other(X), expected)
        assert not torch.equal(model(X), expected)


@pytest.mark.parametrize("arm", [*CASTING, "native:bf16"])
def test_a_replica_runs_its_own_weights(arm: str) -> None:
    """What DataParallel makes of a model and of a kept module runs the replica's weights, and is not rounded."""
    _, model, _ = prepared(arm, "lm_head")
    replica, head = model._replicate_for_data_parallel(), model.lm_head._replicate_for_data_parallel()
    head.weight, head.bias = model.lm_head.weight * 2, model.lm_head.bias * 2
    replica._modules["lm_head"] = head
    with torch.no_grad():
        assert torch.equal(replica(X), model(X) * 2)


def test_a_fused_layer_of_torch_takes_the_kept_norm() -> None:
    """In evaluation torch's transformer layer runs its parts one by one, since a kept one is among them."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    _, model, _ = prepared("half:bf16", "*.norm1", nn.Sequential(layer))
    with torch.no_grad():
        trained, evaluated = model(X[None]), model.eval()(X[None])
    torch.testing.assert_close(trained, evaluated, rtol=0.02, atol=0.02)
