"""All mistakes, by code and by name: those that rules find, and those that only guards see at run time."""

import importlib
import pkgutil

from ampcompare.source.lint import rules
from ampcompare.source.lint.read.module import RULES as RULES
from ampcompare.source.lint.read.module import Mistake

GROUPS = {
    "AMP1": "Misuse of Apex",
    "AMP2": "Misuse of torch.amp",
    "AMP3": "Removed or deprecated",
    "AMP4": "Style",
}
SEEN_BY_GUARDS = (
    Mistake(
        "",
        "autocast-elsewhere",
        "the forward pass is under autocast for a different device than the one it runs on",
        "nothing is cast: what is called mixed precision trains in fp32, with its speed and memory",
        "pass the device used for training, `torch.autocast(device.type, ...)`, or leave autocast out there",
    ),
    Mistake(
        "",
        "scaler-off",
        "a GradScaler is built for a device that torch does not see",
        "torch switches it off with a warning: losses are not scaled, and overflows are not detected",
        "build it for the device used for training, or with `enabled=False` where it is not needed",
    ),
    Mistake(
        "",
        "accelerator-off",
        "an Accelerator is asked for fp16 on a CPU, where Accelerate does not support it",
        "it silently switches mixed precision off: what is called fp16 trains in fp32",
        'write `mixed_precision="bf16"`, which Accelerate supports on a CPU, or `"no"`',
    ),
    Mistake(
        "",
        "autocast-without-dtype",
        "autocast without a dtype uses fp16, and no loss is scaled",
        "gradients below 2**-24 become 0; on a CPU the same line uses bfloat16, so results differ",
        "write `dtype=torch.bfloat16`, or scale the loss by a GradScaler",
    ),
    Mistake(
        "",
        "stale-cast",
        "weights are written inside of an autocast block that has cast them, and used in it again",
        "the block goes on with the old cast: a swapped or updated model computes what the one before did",
        "enter autocast for each forward pass by itself, or call `torch.clear_autocast_cache()` behind the write",
    ),
    Mistake(
        "",
        "gradients-kept",
        "the gradients of a skipped step are not cleared before the next one",
        "they are infinite or NaN and stay so: every later step is skipped, or applies them",
        "call `optimizer.zero_grad()` after every step, skipped or not",
    ),
    Mistake(
        "",
        "weights-apart",
        "under O2 a script writes weights of the model, or their master weights, outside of the optimizer's `step()`",
        "the next step overwrites what the model got; what masters got reaches the model at that step only, or never",
        "write the same values into the model and into `amp.master_params(optimizer)`, or train with `torch.amp`, "
        "which has one set of weights",
    ),
)
for file in pkgutil.iter_modules(rules.__path__):  # whose import registers its rules
    importlib.import_module(f"{rules.__name__}.{file.name}")
MISTAKES: tuple[Mistake, ...] = tuple(
    sorted(
        (*SEEN_BY_GUARDS, *(mistake for rule in RULES for mistake in rule.mistakes)),
        key=lambda mistake: mistake.code or "guard",
    )
)
CODES: dict[str, Mistake] = {mistake.code: mistake for mistake in MISTAKES if mistake.code}
BY_NAME: dict[str, Mistake] = {mistake.name: mistake for mistake in MISTAKES}
