"""Networks with one fixed batch: three that fill a GPU, one that is nothing but host work, and a small twin of each."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from workloads import sgd, tiny

Model = tuple[nn.Module, Tensor, Tensor]
CLASSES = 1000
# The size of a batch on the GPU, and in a rehearsal.
BATCH = {"resnet50": (64, 2), "resnet18": (128, 2), "transformer": (8, 2), "tiny": (8, 8)}


def _resnet(name: str) -> Callable[[int, bool], Model]:
    def make(batch: int, small: bool) -> Model:
        if small:
            layers = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
            model: nn.Module = nn.Sequential(
                *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)
            )
        else:
            from ampcompare.tasks.torchvision_loader import load_torchvision

            model = getattr(load_torchvision().models, name)(weights=None)
        size = 8 if small else 224
        images = torch.randn(batch, 3, size, size).contiguous(memory_format=torch.channels_last)
        return model.to(memory_format=torch.channels_last), images, torch.randint(0, CLASSES, (batch,))

    return make


class Transformer(nn.Module):
    """A pre-norm encoder with learned tokens; 110 million parameters at width 768, 12 layers, 32,000 tokens."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width,
            max(1, width // 64),
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.tokens = nn.Embedding(tokens, width)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        # Tokens come as numbers, so that loops that cast their input to half leave them whole up to 2048.
        output: Tensor = self.head(self.layers(self.tokens(x.long())).flatten(0, 1))
        return output


def _transformer(batch: int, small: bool) -> Model:
    model = Transformer(16, 1, 64) if small else Transformer(768, 12, 32_000)
    length = 8 if small else 512
    x = torch.randint(0, 64 if small else 2048, (batch, length)).float()
    return model, x, torch.randint(0, CLASSES, (batch * length,))


def _tiny(batch: int, small: bool) -> Model:
    return tiny()


MODELS: dict[str, Callable[[int, bool], Model]] = {
    "resnet50": _resnet("resnet50"),
    "resnet18": _resnet("resnet18"),
    "transformer": _transformer,
    "tiny": _tiny,
}


def make_model(name: str, device: str, *, small: bool, batch: int | None = None) -> Model:
    """Return a network of seeded weights with one batch of inputs and classes, on a device.

    Args:
        small: the twin for a rehearsal.
        batch: samples; by default those of `BATCH`.
    """
    torch.manual_seed(0)
    model, x, y = MODELS[name](batch or BATCH[name][small], small)
    return model.to(device), x.to(device), y.to(device)


def adamw(params: object, *, fused: bool = False) -> torch.optim.Optimizer:
    """AdamW as transformers are trained with, in torch's default implementation or the fused one."""
    return torch.optim.AdamW(params, lr=1e-6, fused=fused or None)  # type: ignore[arg-type]


def make_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes the optimizer of a model: AdamW for the transformer, SGD for the others."""
    return adamw if name == "transformer" else sgd
