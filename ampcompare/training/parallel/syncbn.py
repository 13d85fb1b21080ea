"""Batch norms whose statistics span all ranks: torch's, or Apex's."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType

import torch
from torch import nn

from ampcompare.base.errors import UnsupportedCombination

__all__ = ["Convert", "apex_parallel", "keep", "make_converter"]

Convert = Callable[[nn.Module], nn.Module]


def keep(model: nn.Module) -> nn.Module:
    """Return `model` as it is."""
    return model


def apex_parallel(engine: str | None) -> ModuleType:
    """Return the real `apex.parallel` if the arm runs on the real Apex, else ampcompare's own."""
    return importlib.import_module("apex.parallel" if engine == "nvidia" else "ampcompare.apex.parallel")


def make_converter(kind: str, device: torch.device, engine: str | None) -> Convert:
    """Return what replaces the batch norms of a model.

    Args:
        kind: "none", "torch" or "apex".
        device: where the model will be.
        engine: of the arm: "nvidia", "compat", or None for arms without Apex.

    Raises:
        UnsupportedCombination: torch's layer on a CPU, for which it has no kernels.
    """
    if kind == "none":
        return keep
    if kind == "torch":
        if device.type == "cpu":
            raise UnsupportedCombination(
                "torch's SyncBatchNorm has no CPU kernels, but the device is cpu; use --sync-bn apex"
            )
        return nn.SyncBatchNorm.convert_sync_batchnorm

    def convert(model: nn.Module) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Apex announces its own deprecation
            converted: nn.Module = apex_parallel(engine).convert_syncbn_model(model)
        return converted

    return convert
