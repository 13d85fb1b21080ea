"""How the processes of a run share one model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ampcompare.settings.recipe import Frozen, Positive

__all__ = ["ParallelConfig"]


class ParallelConfig(Frozen):
    """How replicas of the model work together."""

    kind: Literal["none", "ddp", "apex-ddp", "dp", "fsdp"] = Field(
        "none",
        description="DDP of torch or of Apex; fsdp: weights in shards; dp: one process with many GPUs. ddp by default "
        "with several processes, fsdp for arms of that name",
    )
    sync_bn: Literal["none", "torch", "apex"] = Field(
        "none", description="SyncBatchNorm implementation that replaces batch norm"
    )
    bucket_cap_mb: Positive | None = Field(None, description="ddp, apex-ddp: MiB of gradients reduced together")
    delay_allreduce: bool = Field(False, description="apex-ddp: reduce once, at the end of the backward pass")
    find_unused_parameters: bool = Field(False, description="ddp: some parameters may get no gradient")
    backend: Literal["auto", "gloo", "nccl", "mpi"] = Field(
        "auto", description="torch.distributed backend; auto: nccl on GPUs and gloo on CPUs"
    )

    @property
    def needs_group(self) -> bool:
        """Whether a process group must exist, even with one process."""
        return self.kind in ("ddp", "apex-ddp", "fsdp")

    @model_validator(mode="after")
    def _options_have_a_kind(self) -> ParallelConfig:
        kinds = {
            "sync_bn": (self.sync_bn != "none", ("ddp", "apex-ddp")),
            "bucket_cap_mb": (self.bucket_cap_mb is not None, ("ddp", "apex-ddp")),
            "delay_allreduce": (self.delay_allreduce, ("apex-ddp",)),
            "find_unused_parameters": (self.find_unused_parameters, ("ddp",)),
        }
        for name, (given, fitting) in kinds.items():
            if given and self.kind not in fitting:
                raise ValueError(f"{name} is for kind {' and '.join(fitting)}, but the kind is {self.kind}")
        if self.delay_allreduce and self.bucket_cap_mb is not None:
            raise ValueError(
                "delay_allreduce reduces all gradients at once, so bucket_cap_mb has no effect; leave one of them out"
            )
        return self
