"""What advice keeps in fp32 where an fp32 piece meets a model that is cast, and that a script trains with it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

ARMS = ("apex:O2", "half:bf16")


class _Norm(nn.Module):
    """Computes in fp32 and keeps the result so."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.float() * nn.functional.normalize(x.float(), dim=-1)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = _Norm(8), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(self.norm(x))


class _Whitened(nn.Module):
    """Has fp32 tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.mean


class _Heads(nn.Module):
    """Two heads behind `.float()`, of which the second is met when the first is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleDict({"box": nn.Linear(8, 4), "score": nn.Linear(8, 1)})

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x).float()
        return self.heads["box"](features).sum(1) + self.heads["score"](features)[:, 0]


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.rnn, self.head = nn.Linear(8, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.body(x)[:, None].float())[0][:, -1])


class _Encoded(nn.Module):
    """The whole layer of torch gets fp32, so it is named and not what is inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.body(x)[:, None].float())[:, 0])


def _blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(_Block(), _Block()), nn.Linear(8, 1))


def _whitened() -> nn.Module:
    return nn.Sequential(_Whitened(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


NETWORKS: dict[str, tuple[Any, list[str]]] = {
    "norms of blocks": (_blocks, ["1.*.norm"]),
    "tensors that are no buffers": (_whitened, ["0"]),
    "two heads": (_Heads, ["heads.box", "heads.box|heads.score"]),
    "recurrent": (_Recurrent, ["rnn", "rnn|head"]),
    "a layer of torch": (_Encoded, ["layer", "layer|head"]),
}


def _train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_script_trains_with_what_is_advised(behind: Any, name: str, arm: str) -> None:
    """The first advice is followed each time, as the preflight does, until the script trains."""
    make, kept = NETWORKS[name]
    torch.manual_seed(0)
    for pattern in ["", *kept]:
        joined = "," if ":" in arm else ":"
        stand_in = behind(f"{arm}{joined}keep_fp32={pattern}" if pattern else arm)
        if pattern == kept[-1]:
            _train(make())
            return
        with pytest.raises((RuntimeError, ValueError)) as raised:
            _train(make())
        refusal = stand_in.find_refusal_of_error(raised.value)
        assert refusal is not None
        assert refusal.advice.arms[0].endswith(
            f"keep_fp32={kept[0 if not pattern else kept.index(pattern) + 1]}"
        )
        behind.end()


def test_nothing_is_noted_behind_the_first_backward_pass(behind: Any) -> None:
    """Later calls of modules cost nothing."""
    widening = behind("apex:O2").torch_amp.widening
    before, after = _Norm(8), _Norm(8)
    before(torch.randn(2, 8).half())
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    _train(model)
    after(torch.randn(2, 8).half())
    assert widening.names_of_innermost_widening_modules(nn.Sequential(before, after)) == ["0"]
    assert widening.names_of_innermost_widening_modules(model) == []
