"""Hashes of weights and batches: whether training moved the weights, and whether two runs had the same ones."""

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ampcompare.base.tensors.sharded import gather_whole
from ampcompare.base.tensors.tree import tensors_in_value


def parameters_sha256(models: Sequence[nn.Module]) -> str:
    """Return a hash that changes with any number of a parameter; buffers move in every forward pass and are left out.

    Floating ones count by value, as float32: lifting 16-bit weights keeps their hash. Shards are gathered by all ranks.
    """
    return _sha256_of_tensors(
        _as_float32_tensor(parameter) for model in models for parameter in model.parameters()
    )


def weights_sha256(models: Sequence[nn.Module]) -> str:
    """Return a hash of all parameters and buffers by value: floating ones as float32, so that storage does not count.

    Equal hashes mean equal weights: fp16 and bf16 are exact in float32. float64 stays what it is.
    """
    return _sha256_of_tensors(
        _as_float32_tensor(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())
    )


def inputs_sha256(inputs: Any) -> str | None:
    """Return a hash of the tensors inside what a module is called with; None if there are none."""
    tensors = list(tensors_in_value(inputs))
    return _sha256_of_tensors(tensors) if tensors else None


def generators_sha256() -> str:
    """Return a hash of the states of the global generators of torch, on all devices in use, NumPy and Python."""
    digest = hashlib.sha256(repr(random.getstate()).encode())
    name, words, *rest = np.random.get_state()
    digest.update(repr((name, rest)).encode())
    digest.update(np.asarray(words).tobytes())
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    for state in states:
        digest.update(state.numpy().data)
    return digest.hexdigest()


def _as_float32_tensor(tensor: Tensor) -> Tensor:
    narrow = tensor.is_floating_point() and tensor.dtype != torch.float64
    return gather_whole(tensor.detach()).cpu().float() if narrow else tensor


def _sha256_of_tensors(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        for part in _dense_parts_of(gather_whole(tensor.detach())):
            digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _dense_parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """Return a tensor, or what stores a sparse or nested one."""
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
