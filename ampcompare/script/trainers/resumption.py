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


def note_saved_state_folders(note: Note, events: Subscriptions) -> None:
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

    def follow_transformers() -> None:
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

    def follow_lightning(name: str) -> None:
        kind: Any = sys.modules[name].Trainer
        place = 4  # of `ckpt_path`, behind the model, two loaders and the data module

        def fit(inner: Any, trainer: Any, *args: Any, **options: Any) -> Any:
            if (
                checkpoint
                and options.get("ckpt_path") is None
                and (len(args) <= place or args[place] is None)
            ):
                args = args[:place]
                options["ckpt_path"] = checkpoint
                note(TraceRowKind.TRAINER, by=f"Trainer.fit(ckpt_path={os.path.basename(checkpoint)!r})")
            return inner(trainer, *args, **options)

        events.wrap(kind, "fit", fit)

    made: list[Any] = []
    is_loaded = not states

    def load_states() -> None:
        nonlocal is_loaded
        if not is_loaded and made:
            is_loaded = True
            accelerator, by = made[-1], f"Accelerator.load_state({os.path.basename(states)!r})"
            accelerator.load_state(states)
            saved = os.path.basename(states).rpartition("_")[2]
            if accelerator.project_configuration.automatic_checkpoint_naming and saved.isdigit():
                # It would save to the folder of the first checkpoint, and refuses one that is there.
                accelerator.project_configuration.iteration = int(saved) + 1
                by += f", and project_configuration.iteration = {int(saved) + 1}"
            note(TraceRowKind.TRAINER, by=by)

    def follow_accelerate() -> None:
        def init(inner: Any, accelerator: Any, *args: Any, **options: Any) -> None:
            inner(accelerator, *args, **options)
            made.append(accelerator)

        def load(inner: Any, *args: Any, **options: Any) -> Any:
            nonlocal is_loaded
            is_loaded = True  # by the script itself
            return inner(*args, **options)

        kind = sys.modules[ACCELERATOR].Accelerator
        events.wrap(kind, "__init__", init)
        events.wrap(kind, "load_state", load)

    def follow_loaders() -> None:
        def iterate(inner: Any, loader: Any) -> Any:
            load_states()
            return inner(loader)

        for name in ("DataLoaderShard", "DataLoaderDispatcher"):
            events.wrap(getattr(sys.modules[LOADERS], name), "__iter__", iterate)

    _call_when_imported(
        {
            "transformers.trainer": follow_transformers,
            **{name: functools.partial(follow_lightning, name) for name in LIGHTNING},
            ACCELERATOR: follow_accelerate,
            LOADERS: follow_loaders,
        },
        events,
    )


def _call_when_imported(modules: dict[str, Callable[[], None]], events: Subscriptions) -> None:
    imports = ImportHook(modules)
    imports.begin()
    events.call_at_end(imports.end)
