"""Convert a checkpoint between Apex and torch.amp: the command `convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ampcompare.training.checkpoint.convert.fp32_weights import Conversion

__all__ = ["convert_checkpoint"]


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    to: Literal["native", "apex"],
    *,
    opt_level: Literal["O0", "O1", "O2", "O3", "O4", "O5"] | None = None,
    save_apex_format: bool = False,
    unsafe_load: bool = False,
) -> Conversion:
    """Convert a checkpoint file between Apex and torch.amp. Imports torch.

    Args:
        source: a checkpoint of ampcompare, of a script with apex.amp, FP16_Optimizer or torch.amp, of timm, mmengine or
            Lightning.
        target: file to write, in the layout of `source`.
        to: "native" for torch.amp, "apex" for apex.amp.
        opt_level: level of the Apex side; by default inferred from the source, or O1 for the result.
        save_apex_format: write exactly what an Apex script saves, with `to="apex"`.
        unsafe_load: unpickle arbitrary objects in `source`, which can run any code.

    Returns:
        What was converted: `source` and `level` that were inferred, and `changed` and `lost` as texts.

    Raises:
        CheckpointError: the source cannot be read, or holds objects that are not loaded without `unsafe_load`.
        ConversionError: it already has the requested kind, has nothing to convert, or is the target.
        EnvironmentUnfit: the target cannot be written.
    """
    from ampcompare.training.checkpoint.convert.convert import convert_file

    return convert_file(
        Path(source), Path(target), to, opt_level=opt_level, legacy_layout=save_apex_format, trust=unsafe_load
    )
