"""Image classifiers of timm, by their names there."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ampcompare.base.errors import BackendUnavailable, ConfigError, did_you_mean
from ampcompare.tasks.packages import needs_package
from ampcompare.tasks.torchvision_loader import load_torchvision

__all__ = ["timm_model"]


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
