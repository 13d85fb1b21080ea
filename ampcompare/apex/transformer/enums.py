"""Kinds of layers, attention, masks and models, with the names and values of `apex.transformer.enums`."""

from __future__ import annotations

import enum

__all__ = ["AttnMaskType", "AttnType", "LayerType", "ModelType"]


class LayerType(enum.Enum):
    """Side of a transformer that a layer belongs to."""

    encoder = 1
    decoder = 2


class AttnType(enum.Enum):
    """Whether keys come from the queries' own sequence."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """What an attention mask hides: padding, or the future."""

    padding = 1
    causal = 2


class ModelType(enum.Enum):
    """Whether a model has one side or both."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
