"""From the name of a model to the model: ampcompare's, torchvision's, timm's, a user's."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ampcompare.base.errors import BackendUnavailable, ConfigError, did_you_mean
from ampcompare.tasks.catalog import BUILTIN_MODELS, needs_package
from ampcompare.tasks.factory import blamed, named_by, resolve_factory
from ampcompare.tasks.networks import CenterNet, ConvNet, Mlp, Transformer, UNet
from ampcompare.tasks.torchvision_loader import load_torchvision

__all__ = [
    "build_detector",
    "build_model",
    "build_segmenter",
    "build_torchvision",
    "check_arguments",
    "fixed_channels",
    "timm_model",
    "user_model",
]


def timm_model(name: str, *, num_classes: int, sample_shape: Sequence[int], arguments: Mapping[str, Any]) -> nn.Module:
    """Build a model of timm with weights from torch's global generator; nothing is downloaded.

    Args:
        name: as timm has it, such as resnet50.
        num_classes: width of the output.
        sample_shape: (channels, height, width); any number of channels.
        arguments: further keyword arguments of the model; they override those above.

    Raises:
        ConfigError: unknown name or arguments, or samples that are not images.
        BackendUnavailable: timm is not installed.
    """
    with contextlib.suppress(BackendUnavailable):
        load_torchvision()  # timm imports it, and could not where its operators do not fit torch
    with needs_package(f"--arch timm:{name} needs", "timm"):
        import timm
    if not timm.is_model(name):
        raise ConfigError(f"timm has no model {name!r}; {did_you_mean(name, timm.list_models())}")
    shape = tuple(sample_shape)
    if len(shape) != 3:
        raise ConfigError(f"timm:{name} takes images (channels, height, width), and a sample has shape {shape}")
    options: dict[str, Any] = {"num_classes": num_classes, "in_chans": shape[0]}
    known = timm.get_pretrained_cfg(name)
    if known is not None and known.fixed_input_size:  # as a ViT, whose positions belong to patches of one size
        options["img_size"] = shape[1:]
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **{**options, **arguments})
    except Exception as error:  # each architecture checks its arguments in its own way
        text = " ".join(str(error).split())
        raise ConfigError(
            f"timm:{name} cannot be built for samples of shape {shape} ({type(error).__name__}: {text}); give other "
            "images by --image-size, or choose another model"
        ) from error
    return model


_NETWORKS: dict[str, Callable[..., nn.Module]] = {"convnet": ConvNet, "mlp": Mlp, "transformer": Transformer}
_OWN = {"classification": tuple(_NETWORKS), "segmentation": ("unet",), "detection": ("centernet",)}
_TORCHVISION_CHANNELS = 3
_REMEDY = "give other images by --image-size, or choose another model"
# Auxiliary heads would make the output a tuple; the slow initialization is deprecated in torchvision.
_SPECIAL_OPTIONS = {name: {"aux_logits": False, "init_weights": False} for name in ("googlenet", "inception_v3")}


def build_model(
    arch: str, *, num_classes: int, sample_shape: Sequence[int], model_args: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build the model called `arch`, in fp32 on the CPU, with weights from torch's global generator.

    Args:
        arch: `convnet`, `mlp`, `transformer`, a torchvision classifier, `timm:NAME`, or `package.module:factory`. A
            user's factory is called with those of `num_classes`, `sample_shape` and `in_channels` that it names as
            parameters.
        num_classes: width of the output.
        sample_shape: of one sample; (channels, height, width) for images.
        model_args: further keyword arguments; they override those above.

    Raises:
        ConfigError: unknown name, unknown arguments, or samples that it cannot process.
        BackendUnavailable: it is not built in, and there is no torchvision.
    """
    arguments = dict(model_args or {})
    library, _, name = arch.partition(":")
    if library == "timm":
        model = timm_model(name, num_classes=num_classes, sample_shape=sample_shape, arguments=arguments)
        _check_forward(arch, model, tuple(sample_shape))
        return model
    if ":" in arch:
        return user_model(arch, _offered(num_classes, sample_shape), arguments)
    if arch in BUILTIN_MODELS:
        network = _NETWORKS[arch]
        check_arguments(arch, network, arguments)
        return network(num_classes, sample_shape, **arguments)
    return build_torchvision(
        arch, kind="classification", num_classes=num_classes, sample_shape=sample_shape, model_args=arguments
    )


def build_segmenter(
    arch: str, *, num_classes: int, sample_shape: Sequence[int], model_args: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build the model called `arch` that gives logits for each pixel, in fp32 on the CPU.

    Args:
        arch: `unet`, a torchvision model for segmentation, or `package.module:factory`; see `build_model`.
        num_classes: channels of the output.
        sample_shape: (channels, height, width).
        model_args: further keyword arguments; they override those above.

    Raises:
        ConfigError: unknown name, unknown arguments, or samples that it cannot process.
    """
    arguments = dict(model_args or {})
    if ":" in arch:
        return user_model(arch, _offered(num_classes, sample_shape), arguments)
    if arch != "unet":
        return build_torchvision(
            arch, kind="segmentation", num_classes=num_classes, sample_shape=sample_shape, model_args=arguments
        )
    check_arguments(arch, UNet, arguments)
    return UNet(num_classes, sample_shape, **arguments)


def build_detector(
    arch: str, *, num_classes: int, sample_shape: Sequence[int], model_args: Mapping[str, Any] | None = None
) -> nn.Module:
    """Build the model called `arch` that finds boxes, in fp32 on the CPU.

    Args:
        arch: `centernet`, a torchvision model for detection, or `package.module:factory`; see `build_model`.
        num_classes: with the background, which is 0.
        sample_shape: (channels, height, width).
        model_args: further keyword arguments; they override those above.

    Raises:
        ConfigError: unknown name, unknown arguments, or a model that needs more than boxes and labels.
    """
    arguments = dict(model_args or {})
    if ":" in arch:
        return user_model(arch, _offered(num_classes, sample_shape), arguments)
    if arch == "centernet":
        check_arguments(arch, CenterNet, arguments)
        return CenterNet(num_classes, sample_shape, **arguments)
    if arch.startswith(("maskrcnn_", "keypointrcnn_")):
        raise ConfigError(f"{arch} is trained with masks or key points, and the task has boxes; choose another model")
    if not arch.startswith("ssd"):  # which have one size; the others would enlarge an image to 800 pixels
        sides = sample_shape[1:]
        arguments = {"min_size": min(sides), "max_size": max(sides), **arguments}
    return build_torchvision(
        arch, kind="detection", num_classes=num_classes, sample_shape=sample_shape, model_args=arguments
    )


def fixed_channels(arch: str, kind: str = "classification") -> int | None:
    """Return how many channels `arch` requires: 3 for torchvision's; None if it adapts or is not known.

    Args:
        kind: of model, classification, segmentation or detection.

    Raises:
        ConfigError: unknown name.
        BackendUnavailable: it is not built in, and there is no torchvision.
    """
    if arch in _OWN[kind] or ":" in arch:
        return None
    _require_kind(load_torchvision(), arch, kind)
    return _TORCHVISION_CHANNELS


def _offered(num_classes: int, sample_shape: Sequence[int]) -> dict[str, Any]:
    """Return the arguments that a user's model of images or vectors may name."""
    return {"num_classes": num_classes, "sample_shape": tuple(sample_shape), "in_channels": sample_shape[0]}


def user_model(path: str, offered: Mapping[str, Any], arguments: Mapping[str, Any]) -> nn.Module:
    """Return the model of a user's factory.

    Args:
        path: `package.module:factory`.
        offered: arguments, of which it gets those that it names as parameters.
        arguments: further ones, which override those.

    Raises:
        ConfigError: there is no such factory, it raises, or returns no module.
    """
    factory = resolve_factory(path)
    with blamed(path, "calling it"):
        model = factory(**{**named_by(factory, offered), **arguments})
    if not isinstance(model, nn.Module):
        raise ConfigError(f"factory {path} returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


def build_torchvision(
    arch: str, *, kind: str, num_classes: int, sample_shape: Sequence[int], model_args: Mapping[str, Any]
) -> nn.Module:
    """Build a model of torchvision without weights from elsewhere, and run it once on meta tensors if it takes those.

    Args:
        kind: of model, classification, segmentation or detection; one for segmentation returns a dict with logits as
            `out`.

    Raises:
        ConfigError: there is none of this kind and name, or it cannot process such samples.
        BackendUnavailable: there is no torchvision.
    """
    vision = load_torchvision()
    _require_kind(vision, arch, kind)
    shape = tuple(sample_shape)
    if len(shape) != 3 or shape[0] != _TORCHVISION_CHANNELS:
        raise ConfigError(
            f"{arch} takes color images (3, height, width), and a sample has shape {shape}; use --arch "
            + " or ".join(name for name in _OWN[kind] if name != "transformer")
        )
    options: dict[str, Any] = {"weights": None, "num_classes": num_classes, **_SPECIAL_OPTIONS.get(arch, {})}
    if kind != "classification":
        options["weights_backbone"] = None  # torchvision would download those of ImageNet
    if arch.startswith("vit_"):
        if shape[1] != shape[2]:
            raise ConfigError(f"{arch} takes square images, and a sample is {shape[1]}x{shape[2]}; give --image-size")
        options["image_size"] = shape[1]
    if arch.startswith("maxvit_"):
        options["input_size"] = shape[1:]
    try:
        model: nn.Module = vision.models.get_model(arch, **{**options, **model_args})
    except Exception as error:  # each architecture checks its arguments in its own way
        text = " ".join(str(error).split())
        raise ConfigError(
            f"{arch} cannot be built for samples of shape {shape} ({type(error).__name__}: {text}); {_REMEDY}"
        ) from error
    if kind != "detection":  # their boxes depend on values
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


def check_arguments(arch: str, network: Callable[..., nn.Module], arguments: Mapping[str, Any]) -> None:
    """Check that a network has these arguments.

    Raises:
        ConfigError: names one that it does not have.
    """
    parameters = inspect.signature(network).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in arguments:
        if name not in known:
            raise ConfigError(f"{arch} has no argument {name!r}; {did_you_mean(name, known)}")


def _require_kind(vision: ModuleType, arch: str, kind: str) -> None:
    module = vision.models if kind == "classification" else getattr(vision.models, kind)
    known = vision.models.list_models(module=module)
    if arch in known:
        return
    suggestion = did_you_mean(arch, [*_OWN[kind], *known])
    if arch in vision.models.list_models():
        raise ConfigError(f"{arch} is a torchvision model, but not for {kind}; {suggestion}")
    raise ConfigError(f"there is no model {arch!r}; {suggestion}")
