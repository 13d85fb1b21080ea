"""From settings to a `Parallel`."""

from __future__ import annotations

import torch

from ampcompare.base.errors import UnsupportedCombination
from ampcompare.parallel.replication import DDP, DP, FSDP, ApexDDP, Parallel, Single
from ampcompare.parallel.syncbn import apex_parallel, make_converter
from ampcompare.settings.parallel import ParallelConfig

__all__ = ["make_parallel"]


def make_parallel(config: ParallelConfig, device: torch.device, engine: str | None = None) -> Parallel:
    """Build what a configuration names; the caller initializes the process group, except for none and dp.

    Args:
        device: of this process.
        engine: of the arm: "nvidia", "compat", or None for arms without Apex.

    Raises:
        UnsupportedCombination: names what cannot work together, and why.
    """
    if config.kind == "none":
        return Single()
    if config.kind == "dp":
        if device.type != "cuda":
            raise UnsupportedCombination(
                f"dp splits a batch over the GPUs of one process, but the device is {device}, where it has no effect; "
                f"use --parallel ddp with --nproc-per-node"
            )
        if engine == "nvidia":
            raise UnsupportedCombination(
                "the real Apex replaces the forward of the one model that it was given, so that all replicas of dp "
                "would run the first one's weights; use --parallel ddp, or --engine compat"
            )
        return DP()
    if config.kind == "fsdp":
        return FSDP()
    convert = make_converter(config.sync_bn, device, engine)
    if config.kind == "ddp":
        return DDP(
            device,
            convert=convert,
            bucket_cap_mb=config.bucket_cap_mb,
            find_unused_parameters=config.find_unused_parameters,
        )
    if engine == "nvidia" and device.type != "cuda":
        raise UnsupportedCombination(
            f"the DistributedDataParallel of the real Apex needs a GPU, but the device is {device}; use --engine compat"
        )
    return ApexDDP(
        apex_parallel(engine).DistributedDataParallel,
        convert=convert,
        bucket_cap_mb=config.bucket_cap_mb,
        delay_allreduce=config.delay_allreduce,
    )
