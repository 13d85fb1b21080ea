"""Start a trainer of a library again as its user would, where the script itself names no checkpoint.

| library | what is called |
|---|---|
| transformers | `Trainer.train(resume_from_checkpoint=True)`, where its folder has a checkpoint |
| Lightning | `Trainer.fit(ckpt_path=...)` with the file that was saved last |
| Accelerate | `Accelerator.load_state(...)` of what `save_state` has saved last, before the first batch is drawn |
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from ampcompare.base.import_hook import ImportHook
from ampcompare.base.patches import Subscriptions
from ampcompare.settings.resume_trace import TraceRowKind

Note = Callable[..., None]
LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
ACCELERATOR, LOADERS = "accelerate.accelerator", "accelerate.data_loader"


def note_accelerate_state_folders(note: Note, events: Subscriptions) -> None:
    """Note each folder that `Accelerator.save_state` fills."""

    def follow() -> None:
        def save(inner: Any, accelerator: Any, *args: Any, **options: Any) -> Any:
            folder = inner(accelerator, *args, **options)
            note(TraceRowKind.STATES, path=os.path.abspath(os.fspath(folder)))
            return folder

        events.wrap(sys.modules[ACCELERATOR].Accelerator, "save_state", save)

    _call_when_imported({ACCELERATOR: follow}, events)


def start_trainers_from_checkpoint(checkpoint: str, states: str, note: Note, events: Subscriptions) -> None:
    """Let trainers that the script calls without a checkpoint take that of an earlier run.

    Args:
        checkpoint: the file that was saved last; "" for none.
        states: the folder that `Accelerator.save_state` has filled last; "" for none.
    """

    states_loader = _AccelerateStatesLoader(states, note, events)
    _call_when_imported(
        {
            "transformers.trainer": functools.partial(_resume_transformers_trainer, note, events),
            **{
                name: functools.partial(_resume_lightning_trainer, name, checkpoint, note, events)
                for name in LIGHTNING
            },
            ACCELERATOR: states_loader.follow_accelerators,
            LOADERS: states_loader.load_before_first_batch,
        },
        events,
    )


def _resume_transformers_trainer(note: Note, events: Subscriptions) -> None:
    """Let a Trainer of transformers take the last checkpoint of its output folder, if one is there."""

    def train(
        inner: Any, trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any
    ) -> Any:
        if resume_from_checkpoint is None:
            from transformers.trainer_utils import get_last_checkpoint  # type: ignore[import-not-found, unused-ignore]

            folder = trainer.args.output_dir
            if os.path.isdir(folder) and get_last_checkpoint(folder) is not None:
                resume_from_checkpoint = True
                note(TraceRowKind.TRAINER, by="Trainer.train(resume_from_checkpoint=True)")
        return inner(trainer, resume_from_checkpoint, *args, **options)

    events.wrap(sys.modules["transformers.trainer"].Trainer, "train", train)


def _resume_lightning_trainer(name: str, checkpoint: str, note: Note, events: Subscriptions) -> None:
    """Let the Trainer of a module of Lightning take the file that was saved last."""
    kind: Any = sys.modules[name].Trainer
    place = 4  # of `ckpt_path`, behind the model, two loaders and the data module

    def fit(inner: Any, trainer: Any, *args: Any, **options: Any) -> Any:
        is_given = len(args) > place and args[place] is not None
        if checkpoint and not is_given and options.get("ckpt_path") is None:
            args = args[:place]
            options["ckpt_path"] = checkpoint
            note(TraceRowKind.TRAINER, by=f"Trainer.fit(ckpt_path={os.path.basename(checkpoint)!r})")
        return inner(trainer, *args, **options)

    events.wrap(kind, "fit", fit)


class _AccelerateStatesLoader:
    """Loads a folder of `Accelerator.save_state` before the first batch, unless the script itself loads one."""

    def __init__(self, states: str, note: Note, events: Subscriptions) -> None:
        self._states, self._note, self._events = states, note, events
        self._accelerators: list[Any] = []
        self._is_loaded = not states

    def follow_accelerators(self) -> None:
        """Note each Accelerator that is made, and a load by the script."""

        def init(inner: Any, accelerator: Any, *args: Any, **options: Any) -> None:
            inner(accelerator, *args, **options)
            self._accelerators.append(accelerator)

        def load(inner: Any, *args: Any, **options: Any) -> Any:
            self._is_loaded = True  # by the script itself
            return inner(*args, **options)

        kind = sys.modules[ACCELERATOR].Accelerator
        self._events.wrap(kind, "__init__", init)
        self._events.wrap(kind, "load_state", load)

    def load_before_first_batch(self) -> None:
        """Load where a prepared loader is iterated first."""

        def iterate(inner: Any, loader: Any) -> Any:
            if not self._is_loaded and self._accelerators:
                self._load_states(self._accelerators[-1])
            return inner(loader)

        for name in ("DataLoaderShard", "DataLoaderDispatcher"):
            self._events.wrap(getattr(sys.modules[LOADERS], name), "__iter__", iterate)

    def _load_states(self, accelerator: Any) -> None:
        self._is_loaded = True
        folder = os.path.basename(self._states)
        accelerator.load_state(self._states)
        by = f"Accelerator.load_state({folder!r})"
        number = folder.rpartition("_")[2]
        if accelerator.project_configuration.automatic_checkpoint_naming and number.isdigit():
            # It would save to the folder of the first checkpoint, and refuses one that is there.
            accelerator.project_configuration.iteration = int(number) + 1
            by += f", and project_configuration.iteration = {int(number) + 1}"
        self._note(TraceRowKind.TRAINER, by=by)


def _call_when_imported(modules: dict[str, Callable[[], None]], events: Subscriptions) -> None:
    imports = ImportHook(modules)
    imports.begin()
    events.call_at_end(imports.end)
