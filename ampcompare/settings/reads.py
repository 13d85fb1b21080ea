"""Which settings a command reads: its flags are made from that, and a setting that it does not read is refused.

`tests/cli/test_reads.py` runs each command and compares what it reads with what stands here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ampcompare.base.errors import ConfigError
from ampcompare.base.option_rules import refusal_sentence
from ampcompare.settings.config import RunConfig
from ampcompare.settings.layers import Layer
from ampcompare.settings.validation import paths_and_values, setting_paths

EVERY = frozenset(setting_paths(RunConfig))
RECIPE_OBJECT = "Recipe"  # origin of a layer: like a named recipe it holds more than one command reads

# Why a setting is refused where a script trains, which follows the name of the setting, and what to do.
OF_OWN_LOOP = "is a setting of ampcompare's own training loop, but a script has its own loop"
GIVE_OWN_OPTION = "leave it out, or give the script's own option after --"
DATA_AND_MODEL = frozenset({"recipe.task", "recipe.label_smoothing", "recipe.tta"}) | {
    path for path in EVERY if path.startswith(("recipe.data.", "recipe.model."))
}
OPTIMIZER = frozenset(path for path in EVERY if path.startswith("recipe.optimizer."))
SCHEDULE = frozenset({"recipe.epochs", "recipe.max_steps"}) | {
    path for path in EVERY if path.startswith("recipe.schedule.")
}
# What the process of a run is set up with, by `configure_process`.
PROCESS = frozenset({"device", "threads", "tf32", "deterministic", "recipe.cudnn_benchmark"})
BATCH = frozenset({"recipe.seed", "recipe.batch_size", "recipe.global_batch_size"})
# What a recipe is assembled from: model, data, optimizer, schedule, in one process.
ASSEMBLY = (
    DATA_AND_MODEL
    | OPTIMIZER
    | SCHEDULE
    | PROCESS
    | BATCH
    | {"recipe.channels_last", "recipe.checkpoint_activations", "recipe.ema_decay", "allow_writes"}
)
# How steps are made of it.
STEPS = ASSEMBLY | {"recipe.clip_grad", "recipe.grad_accum_steps", "workers", "pin_memory"}
ARITHMETIC = frozenset({"cpu_half", "autocast_lists"})
# What a script that is watched is started with.
WATCHED_SCRIPT = frozenset(
    {"device", "threads", "allow_writes", "autocast_lists", "recipe.seed", "processes"}
)
# What a script that trains as a cell is started with, and how its record is made. `recipe.max_steps` ends it.
SCRIPT_CELL = WATCHED_SCRIPT | {"recipe.max_steps", "guards", "first_weights"}
SCRIPT_RECORD = frozenset({"warmup_steps", "nan_patience", "stall_timeout"})
# What `find-batch` chooses for each try: a few updates that save nothing and end by themselves.
CHOSEN_BY_FIND_BATCH = frozenset(
    {"recipe.max_steps", "recipe.early_stop", "recipe.target", "on_nan", "rollback_every", "max_rollbacks"}
) | {path for path in EVERY if path.startswith("saving.")}


@dataclass(frozen=True)
class CommandReads:
    """Settings that a command reads, by their paths in `RunConfig`.

    Attributes:
        command: its name.
        recipe: what it reads where it trains a recipe.
        script: what it reads where a user's script trains; empty for a command without scripts.
        refused: what it reads of a recipe to refuse it with a reason of its own; these have no flags.
    """

    command: str
    recipe: frozenset[str]
    script: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()

    @property
    def accepted_paths(self) -> frozenset[str]:
        """Settings that may be given to the command: each has its flag, if there is one."""
        return self.recipe | self.script

    def refuse_unread_settings(self, layers: Iterable[Layer]) -> None:
        """Refuse what somebody asks this command for by name, and what it does not read.

        Raises:
            ConfigError: names the setting and where it was given.
        """
        layers = [layer for layer in layers if layer.origin != RECIPE_OBJECT]
        has_script = any(layer.values.get("script") is not None for layer in layers)
        known = self.script if has_script else self.recipe | self.refused
        for layer in layers:
            for path, _ in paths_and_values(layer.values):
                if path in ("arm", "script") or path.startswith("script.") or _is_known_path(path, known):
                    continue
                origin = layer.origins.get(path, layer.origin)
                raise ConfigError(f"{origin}: {self._why_setting_is_unread(path, has_script=has_script)}")

    def _why_setting_is_unread(self, path: str, *, has_script: bool) -> str:
        if has_script and path in self.recipe:
            return refusal_sentence(path, OF_OWN_LOOP, GIVE_OWN_OPTION)
        return refusal_sentence(self.command, f"does not read {path}", "leave it out")


def _is_known_path(path: str, known_paths: frozenset[str]) -> bool:
    """Return whether a path, such as that of one argument of a network, is known or lies below one that is.

    A path that no setting has is left to the validation, whose message knows similar names.
    """
    parts = path.split(".")
    above = {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return bool(above & known_paths) or not above & EVERY


TRAIN = CommandReads("a run", EVERY, SCRIPT_CELL | SCRIPT_RECORD)
# The script is started as it is, to save and to resume by itself.
VERIFY_RESUME = CommandReads("compare --verify-resume", frozenset(), frozenset({"device"}))
# One step of the script as it is, in this process.
KEEP_STEP = CommandReads("compare --capsule", frozenset(), frozenset({"device"}))
EXPLAIN = CommandReads(
    "explain",
    # one step
    (ASSEMBLY | ARITHMETIC | {"recipe.compile"}) - {"recipe.schedule.gamma", "recipe.schedule.step_epochs"},
    SCRIPT_CELL - {"guards", "first_weights"},
)
DIAGNOSE = CommandReads(
    "diagnose",
    STEPS | ARITHMETIC,
    WATCHED_SCRIPT,
    refused=frozenset({"processes", "recipe.compile", "recipe.cuda_graph"}),
)
AHEAD = CommandReads("diagnose --ahead", STEPS | {"recipe.compile", "recipe.cuda_graph"}, WATCHED_SCRIPT)
PROFILE = CommandReads(
    "profile",
    STEPS | ARITHMETIC | {"recipe.compile"},
    WATCHED_SCRIPT,
    refused=frozenset({"processes", "recipe.cuda_graph"}),
)
FIND_BATCH = CommandReads(
    "find-batch",
    EVERY - CHOSEN_BY_FIND_BATCH - {"recipe.global_batch_size"},
    refused=frozenset({"recipe.global_batch_size"}),
)
# Of a loop that the user wrote, in the user's own process.
LOOP = frozenset({"device", "cpu_half", "autocast_lists", "recipe.seed"})
DIAGNOSE_LOOP, PROFILE_LOOP = (
    CommandReads("diagnose of a loop", LOOP),
    CommandReads("profile of a loop", LOOP),
)
