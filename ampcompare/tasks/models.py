"""From the name of a model to the model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ampcompare.errors import ConfigError, did_you_mean
from ampcompare.tasks.catalog import BUILTIN_MODELS
from ampcompare.tasks.factory import blamed, named_by, resolve_factory
from ampcompare.tasks.networks import ConvNet, Mlp, Transformer
from ampcompare.tasks.torchvision_loader import load_torchvision
from ampcompare.tasks.unet import UNet

__all__ = ["build_model", "build_segmenter", "fixed_channels"]

_NETWORKS: dict[str, Callable[..., nn.Module]] = {"convnet": ConvNet, "mlp": Mlp, "transformer": Transformer}
_TORCHVISION_CHANNELS = 3
_REMEDY = "give other images by --image-size, or choose another model"
# Auxiliary heads would make the output a tuple; the slow initialization is deprecated in torchvision.
_SPECIAL_OPTIONS = {name: {"aux_logits": False, "init_weights": False} for name in ("googlenet", "inception_v3")}


def build_model(
    arch: str, *, num_classes: int, sample_shape: Sequence[int], model_args: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build the model called `arch`, in fp32 on the CPU, with weights from torch's global generator.

    Args:
        arch: `convnet`, `mlp`, `transformer`, a torchvision classifier, or `package.module:factory`. A user's factory
            is called with those of `num_classes`, `sample_shape` and `in_channels` that it names as parameters.
        num_classes: width of the output.
        sample_shape: of one sample; (channels, height, width) for images.
        model_args: further keyword arguments; they override those above.

    Raises:
        ConfigError: unknown name, unknown arguments, or samples that it cannot process.
        BackendUnavailable: it is not built in, and there is no torchvision.
    """
    arguments = dict(model_args or {})
    if ":" in arch:
        return _user_model(arch, num_classes, sample_shape, arguments)
    if arch in BUILTIN_MODELS:
        network = _NETWORKS[arch]
        _check_arguments(arch, network, arguments)
        return network(num_classes, sample_shape, **arguments)
    return _torchvision_model(arch, num_classes, sample_shape, arguments)


def build_segmenter(
    arch: str, *, num_classes: int, sample_shape: Sequence[int], model_args: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build the model called `arch` that gives logits for each pixel, in fp32 on the CPU.

    Args:
        arch: `unet` or `package.module:factory`; see `build_model`.
        num_classes: channels of the output.
        sample_shape: (channels, height, width).
        model_args: further keyword arguments; they override those above.

    Raises:
        ConfigError: unknown name, unknown arguments, or samples that it cannot process.
    """
    arguments = dict(model_args or {})
    if ":" in arch:
        return _user_model(arch, num_classes, sample_shape, arguments)
    if arch != "unet":
        raise ConfigError(f"there is no segmentation model {arch!r}; {did_you_mean(arch, ['unet'])}")
    _check_arguments(arch, UNet, arguments)
    return UNet(num_classes, sample_shape, **arguments)


def fixed_channels(arch: str) -> int | None:
    """Return how many channels `arch` requires: 3 for torchvision's; None if it adapts or is not known.

    Raises:
        ConfigError: unknown name.
        BackendUnavailable: it is not built in, and there is no torchvision.
    """
    if arch in BUILTIN_MODELS or ":" in arch:
        return None
    _require_classifier(load_torchvision(), arch)
    return _TORCHVISION_CHANNELS


def _user_model(path: str, num_classes: int, sample_shape: Sequence[int], arguments: dict[str, Any]) -> nn.Module:
    factory = resolve_factory(path)
    offered = {"num_classes": num_classes, "sample_shape": tuple(sample_shape), "in_channels": sample_shape[0]}
    with blamed(path, "calling it"):
        model = factory(**{**named_by(factory, offered), **arguments})
    if not isinstance(model, nn.Module):
        raise ConfigError(f"factory {path} returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


def _torchvision_model(
    arch: str, num_classes: int, sample_shape: Sequence[int], arguments: dict[str, Any]
) -> nn.Module:
    vision = load_torchvision()
    _require_classifier(vision, arch)
    shape = tuple(sample_shape)
    if len(shape) != 3 or shape[0] != _TORCHVISION_CHANNELS:
        raise ConfigError(
            f"{arch} takes color images (3, height, width), and a sample has shape {shape}; use --arch convnet or mlp"
        )
    options: dict[str, Any] = {"weights": None, "num_classes": num_classes, **_SPECIAL_OPTIONS.get(arch, {})}
    if arch.startswith("vit_"):
        if shape[1] != shape[2]:
            raise ConfigError(f"{arch} takes square images, and a sample is {shape[1]}x{shape[2]}; give --image-size")
        options["image_size"] = shape[1]
    if arch.startswith("maxvit_"):
        options["input_size"] = shape[1:]
    try:
        model: nn.Module = vision.models.get_model(arch, **{**options, **arguments})
    except Exception as error:  # each architecture checks its arguments in its own way
        text = " ".join(str(error).split())
        raise ConfigError(
            f"{arch} cannot be built for samples of shape {shape} ({type(error).__name__}: {text}); {_REMEDY}"
        ) from error
    _check_forward(arch, model, shape)
    return model


def _check_forward(arch: str, model: nn.Module, shape: tuple[int, ...]) -> None:
    """Run `model` on meta tensors, so that an image that is too small is an error now, not in the first step."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    model.eval()
    try:
        with torch.no_grad():
            functional_call(
                model,
                {name: tensor.to("meta") for name, tensor in tensors.items()},
                torch.empty(2, *shape, device="meta"),
            )
    except NotImplementedError:  # an operator without a meta kernel tells nothing about the image
        pass
    except (RuntimeError, AssertionError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"{arch} cannot process samples of shape {shape} ({type(error).__name__}: {text}); {_REMEDY}"
        ) from error
    finally:
        model.train()


def _check_arguments(arch: str, network: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> None:
    parameters = inspect.signature(network).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in arguments:
        if name not in known:
            raise ConfigError(f"{arch} has no argument {name!r}; {did_you_mean(name, known)}")


def _require_classifier(vision: ModuleType, arch: str) -> None:
    known = vision.models.list_models(module=vision.models)
    if arch in known:
        return
    suggestion = did_you_mean(arch, [*BUILTIN_MODELS, *known])
    if arch in vision.models.list_models():
        raise ConfigError(f"{arch} is a torchvision model that does not classify images; {suggestion}")
    raise ConfigError(f"there is no model {arch!r}; {suggestion}")
