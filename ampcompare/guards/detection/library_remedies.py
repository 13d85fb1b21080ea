"""What to write instead where a library scales the loss, whose GradScaler the script does not hold."""

from __future__ import annotations

from types import FrameType

from ampcompare.base.location import is_installed_file
from ampcompare.base.patches import calling_frame

ACCELERATE = {
    "clip-scaled": "clip with `accelerator.clip_grad_norm_(model.parameters(), ...)`, which unscales before, or call "
    "`accelerator.unscale_gradients()` before clipping",
    "step-unscaled": "pass the optimizer to `accelerator.prepare`, and step the one that it returns",
    "step-twice": "step the optimizer that `accelerator.prepare` returns, once",
    "amp-state-unsaved": "save with `accelerator.save_state`, or `accelerator.scaler.state_dict()` too",
    "scaler-with-bf16": "build the Accelerator with `mixed_precision` of the dtype that autocast has",
}
FABRIC = {
    "clip-scaled": "clip with `fabric.clip_gradients(model, optimizer, ...)`, which unscales before",
    "step-unscaled": "pass the optimizer to `fabric.setup`, and step the one that it returns",
    "step-twice": "step the optimizer that `fabric.setup` returns, once",
}
TRAINER_OF_LIGHTNING = {
    "clip-scaled": "clip in `on_before_optimizer_step`, where gradients are unscaled, or by `gradient_clip_val` of the "
    "Trainer",
}
MANUAL_LIGHTNING = {  # which refuses `gradient_clip_val`
    "clip-scaled": "clip in `on_before_optimizer_step`, where gradients are unscaled, in place of `training_step`",
}
MANUAL_LOOP = ".loops.optimization.manual"  # of Lightning, for modules without `automatic_optimization`
REMEDIES = {
    "accelerate.": ACCELERATE,
    "lightning.fabric.wrappers": FABRIC,
    "lightning_fabric.wrappers": FABRIC,
    "lightning.fabric.fabric": FABRIC,
    "lightning_fabric.fabric": FABRIC,
    "lightning.pytorch.": TRAINER_OF_LIGHTNING,
    "pytorch_lightning.": TRAINER_OF_LIGHTNING,
}


def remedies_of_calling_library() -> dict[str, str]:
    """Return the remedies of the library that runs, by the name of a guard; none for code of the script.

    Where one library calls another, as the Trainer of Lightning calls Fabric, it is the outer one.
    """
    found: dict[str, str] = {}
    is_manual = False
    frame: FrameType | None = calling_frame()
    while frame is not None:
        if is_installed_file(frame.f_code.co_filename):
            name = f"{frame.f_globals.get('__name__', '')}."
            is_manual |= MANUAL_LOOP in name
            found = next((table for begin, table in REMEDIES.items() if name.startswith(begin)), found)
        frame = frame.f_back
    return MANUAL_LIGHTNING if is_manual and found is TRAINER_OF_LIGHTNING else found
