"""Where on its machine a cell ran."""

from __future__ import annotations

from pydantic import Field

from ampcompare.records.fields import FrozenRecord

__all__ = ["Placement"]


class Placement(FrozenRecord):
    """The GPUs and cores that a pool gave to a cell."""

    gpus: list[str] = Field([], description="as CUDA_VISIBLE_DEVICES names them; none where the pool chose none")
    gpu_names: list[str] = Field([])
    cores: list[int] = Field([], description="that its processes ran on; none where the system chose")
    alone: bool = Field(False, description="whether no other cell of the command used these GPUs, which are whole ones")
