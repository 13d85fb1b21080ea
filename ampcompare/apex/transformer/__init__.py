"""The parts of `apex.transformer` that need no model parallelism: the fused softmax and the enumerations."""

from __future__ import annotations

from ampcompare.apex.transformer import functional
from ampcompare.apex.transformer.enums import AttnMaskType, AttnType, LayerType

__all__ = ["AttnMaskType", "AttnType", "LayerType", "functional"]
