"""Models of Transformers by name, shown by a stand-in for the package, which CI does not install."""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from ampcompare.base.errors import ConfigError
from ampcompare.tasks.lm import build_language_model


class Configuration:
    """Keeps every argument, also unknown ones, as that of Transformers does."""

    attribute_map: ClassVar = {"max_position_embeddings": "n_positions"}

    def __init__(self, **options: Any) -> None:
        self.options = {"n_layer": 12, "vocab_size": 50257, **options}

    def to_dict(self) -> dict[str, Any]:
        return self.options


class Network(nn.Module):
    """Logits in an object, as models of Transformers return them."""

    def __init__(self, config: Configuration) -> None:
        super().__init__()
        if config.options["n_layer"] < 1:
            raise ValueError("no layers")
        self.config = config
        self.embed = nn.Embedding(config.options["vocab_size"], config.options["vocab_size"])

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.embed(input_ids))


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A Transformers that knows gpt2; returns the kinds of attention that it was asked for."""
    asked: list[str] = []

    def from_config(config: Configuration, *, attn_implementation: str) -> nn.Module:
        asked.append(attn_implementation)
        return Network(config)

    def for_model(name: str, **options: Any) -> Configuration:
        assert name == "gpt2"
        return Configuration(**options)

    names = SimpleNamespace(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES={"gpt2": "GPT2LMHeadModel"})
    module: Any = ModuleType("transformers")
    module.models = SimpleNamespace(auto=SimpleNamespace(modeling_auto=names))
    module.AutoConfig = SimpleNamespace(for_model=for_model)
    module.AutoModelForCausalLM = SimpleNamespace(from_config=from_config)
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return asked


def build(arch: str = "hf:gpt2", **arguments: Any) -> Any:
    return build_language_model(arch, vocabulary=16, sequence_length=8, model_args=arguments)


def test_a_configuration_makes_the_model(transformers: list[str]) -> None:
    """Sizes and the user's arguments reach the configuration; logits come out, and nothing may be downloaded."""
    model = build(n_layer=2)
    assert model(torch.zeros(3, 8, dtype=torch.int64)).shape == (3, 8, 16)
    options = model.model.config.options
    assert (options["vocab_size"], options["max_position_embeddings"], options["n_layer"]) == (16, 8, 2)
    assert transformers == ["eager"]
    assert os.environ["HF_HUB_OFFLINE"] == "1"


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize(
    ("arch", "arguments", "message"),
    [
        ("hf:gpt3", {}, "no causal language model 'gpt3'; did you mean 'gpt2'"),
        ("hf:gpt2", {"n_layers": 2}, "no argument 'n_layers'; did you mean 'n_layer'"),
        ("hf:gpt2", {"n_layer": 0}, r"cannot be built \(ValueError: no layers\)"),
    ],
)
def test_models_that_cannot_be(arch: str, arguments: dict[str, Any], message: str) -> None:
    """A wrong name, an unknown argument, which Transformers would keep, and one that it refuses are one error each."""
    with pytest.raises(ConfigError, match=message):
        build(arch, **arguments)
