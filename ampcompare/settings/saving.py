"""When a run saves checkpoints, in which form, and from which it resumes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ampcompare.settings.recipe import Frozen, PositiveInt

__all__ = ["SavingConfig"]


class SavingConfig(Frozen):
    """When a run is saved, and what it resumes from. Only a resume into another arm changes results, and the digest."""

    every_steps: PositiveInt | None = Field(None, description="save every this many updates, at the next log interval")
    every_epochs: PositiveInt | None = Field(None, description="save every this many epochs, after the evaluation")
    keep_last: PositiveInt = Field(2, description="checkpoints kept besides the best one")
    in_background: bool = Field(False, description="write from a snapshot while training continues")
    format: Literal["file", "sharded"] = Field(
        "file", description="sharded, with parallel kind fsdp: a folder into which every rank writes its own shards"
    )
    apex_layout: bool = Field(False, description="also write what a legacy Apex script would save")
    weights_format: Literal["checkpoint", "safetensors"] = Field(
        "checkpoint", description="safetensors: also write the weights alone to a file next to it"
    )
    resume: str | None = Field(None, description="a checkpoint or its folder; auto: the newest one of this run, if any")
    resume_into_other_arm: bool = Field(False, description="convert a checkpoint that another arm has written")
    stop_at_step: PositiveInt | None = Field(
        None, description="stop at the first log interval at or after this update, as SIGTERM would"
    )
