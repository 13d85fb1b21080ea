"""From the name of a model to the model: ampcompare's, torchvision's, timm's, a user's."""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from ampcompare.base.errors import BackendUnavailable, ConfigError, suggestion_text
from ampcompare.tasks.catalog import check_model, explain_missing_package, translate_errors
from ampcompare.tasks.factory import factory_errors_reported, resolve_factory, select_arguments
from ampcompare.tasks.networks import CenterNet, ConvNet, Mlp, Transformer, UNet
from ampcompare.tasks.torchvision_loader import load_torchvision


def build_timm_model(
    name: str, *, num_classes: int, sample_shape: Sequence[int], arguments: Mapping[str, Any]
) -> nn.Module:
    """Build a model of timm for images (channels, height, width), with weights from torch's global generator."""
    with contextlib.suppress(BackendUnavailable):
        load_torchvision()  # timm imports it, and could not where its operators do not fit torch
    with explain_missing_package(f"--arch timm:{name} needs", "timm"):
        import timm
    if not timm.is_model(name):
        raise ConfigError(f"timm has no model {name!r}; {suggestion_text(name, timm.list_models())}")
    shape = tuple(sample_shape)
    if len(shape) != 3:
        raise ConfigError(
            f"timm:{name} takes images (channels, height, width), and a sample has shape {shape}"
        )
    options: dict[str, Any] = {"num_classes": num_classes, "in_chans": shape[0]}
    known = timm.get_pretrained_cfg(name)
    # as a ViT, whose positions belong to patches of one size
    if known is not None and known.fixed_input_size:
        options["img_size"] = shape[1:]
    with translate_errors(f"timm:{name} cannot be built for samples of shape {shape}", _REMEDY):
        model: nn.Module = timm.create_model(name, pretrained=False, **{**options, **arguments})
    _check_forward(f"timm:{name}", model, shape)
    return model


_NETWORKS: dict[str, dict[str, Callable[..., nn.Module]]] = {
    "classification": {"convnet": ConvNet, "mlp": Mlp, "transformer": Transformer},
    "segmentation": {"unet": UNet},
    "detection": {"centernet": CenterNet},
}
_TORCHVISION_CHANNELS = 3
_REMEDY = "give other images by --image-size, or choose another model"
# Auxiliary heads would make the output a tuple; the slow initialization is deprecated in torchvision.
_SPECIAL_OPTIONS = {
    name: {"aux_logits": False, "init_weights": False} for name in ("googlenet", "inception_v3")
}


def build_model(
    arch: str,
    *,
    num_classes: int,
    sample_shape: Sequence[int],
    model_args: Mapping[str, Any] | None = None,
    kind: str = "classification",
) -> nn.Module:
    """Build the model called `arch`, in fp32 on the CPU, with weights from torch's global generator.

    Args:
        arch: one of ampcompare's (`convnet`, `mlp`, `transformer`; `unet`; `centernet`), one of torchvision's of this
            kind, `timm:NAME` for classification, or `package.module:factory`. A user's factory is called with those of
            `num_classes`, `sample_shape` and `in_channels` that it names as parameters.
        num_classes: width of the output, channels for segmentation; for detection with the background, which is 0.
        sample_shape: of one sample; (channels, height, width) for images.
        model_args: further keyword arguments; they override those above.
        kind: classification, segmentation (logits for each pixel) or detection (boxes).

    Raises:
        ConfigError: unknown name, unknown arguments, or samples that it cannot process.
        BackendUnavailable: it is not built in, and there is no torchvision.
    """
    arguments = dict(model_args or {})
    library, _, name = arch.partition(":")
    if library == "timm" and kind == "classification":
        return build_timm_model(name, num_classes=num_classes, sample_shape=sample_shape, arguments=arguments)
    if ":" in arch:
        offered = {
            "num_classes": num_classes,
            "sample_shape": tuple(sample_shape),
            "in_channels": sample_shape[0],
        }
        return build_user_model(arch, offered, arguments)
    if network := _NETWORKS[kind].get(arch):
        check_network_arguments(arch, network, arguments)
        return network(num_classes, sample_shape, **arguments)
    if kind == "detection":
        if arch.startswith(("maskrcnn_", "keypointrcnn_")):
            raise ConfigError(
                f"{arch} is trained with masks or key points, and the task has boxes; choose another model"
            )
        if not arch.startswith("ssd"):  # which have one size; the others would enlarge an image to 800 pixels
            sides = sample_shape[1:]
            arguments = {"min_size": min(sides), "max_size": max(sides), **arguments}
    return _build_torchvision_model(arch, kind, num_classes, tuple(sample_shape), arguments)


def fixed_channels(arch: str, kind: str = "classification") -> int | None:
    """Return how many channels `arch` requires: 3 for torchvision's; None if it adapts or is not known."""
    if arch in _NETWORKS[kind] or ":" in arch:
        return None
    load_torchvision()
    return _TORCHVISION_CHANNELS


def build_user_model(path: str, offered: Mapping[str, Any], arguments: Mapping[str, Any]) -> nn.Module:
    """Return the model of a user's factory, called with those of `offered` that it names, and with `arguments`."""
    factory = resolve_factory(path)
    with factory_errors_reported(path, "calling it"):
        model = factory(**{**select_arguments(factory, offered), **arguments})
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"factory {path} returned a {type(model).__name__}; it must return a torch.nn.Module"
        )
    return model


def _build_torchvision_model(
    arch: str, kind: str, num_classes: int, shape: tuple[int, ...], model_args: Mapping[str, Any]
) -> nn.Module:
    """Build a model of torchvision without weights from elsewhere, and run it once on meta tensors if it takes those.

    One for segmentation returns a dict with logits as `out`.
    """
    vision = load_torchvision()
    check_model(arch, kind)
    if len(shape) != 3 or shape[0] != _TORCHVISION_CHANNELS:
        raise ConfigError(
            f"{arch} takes color images (3, height, width), and a sample has shape {shape}; use --arch "
            + " or ".join(name for name in _NETWORKS[kind] if name != "transformer")
        )
    options: dict[str, Any] = {"weights": None, "num_classes": num_classes, **_SPECIAL_OPTIONS.get(arch, {})}
    if kind != "classification":
        options["weights_backbone"] = None  # torchvision would download those of ImageNet
    if arch.startswith("vit_"):
        if shape[1] != shape[2]:
            raise ConfigError(
                f"{arch} takes square images, and a sample is {shape[1]}x{shape[2]}; give --image-size"
            )
        options["image_size"] = shape[1]
    if arch.startswith("maxvit_"):
        options["input_size"] = shape[1:]
    with translate_errors(f"{arch} cannot be built for samples of shape {shape}", _REMEDY):
        model: nn.Module = vision.models.get_model(arch, **{**options, **model_args})
    if kind != "detection":  # their boxes depend on values
        _check_forward(arch, model, shape)
    return model


def _check_forward(arch: str, model: nn.Module, shape: tuple[int, ...]) -> None:
    """Run `model` on meta tensors, so that an image that is too small is an error now, not in the first step."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    model.eval()
    with (
        translate_errors(
            f"{arch} cannot process samples of shape {shape}", _REMEDY, errors=(RuntimeError, AssertionError)
        ),
        # an operator without a meta kernel tells nothing about the image
        contextlib.suppress(NotImplementedError),
        torch.no_grad(),
    ):
        on_meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
        functional_call(model, on_meta, torch.empty(2, *shape, device="meta"))
    model.train()


def check_network_arguments(
    arch: str, network: Callable[..., nn.Module], arguments: Mapping[str, Any]
) -> None:
    parameters = inspect.signature(network).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in arguments:
        if name not in known:
            raise ConfigError(f"{arch} has no argument {name!r}; {suggestion_text(name, known)}")
