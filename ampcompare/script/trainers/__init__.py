"""Libraries that train for a script, each followed from its import on.

Some of their own precision an arm replaces; what it cannot replace it refuses.
"""

import functools

from ampcompare.base.import_hook import ImportHook
from ampcompare.base.patches import Subscriptions
from ampcompare.script.trainers import accelerate, lightning
from ampcompare.script.trainers.arm import TrainerContext

LIBRARIES = (accelerate, lightning)


def follow_trainers(context: TrainerContext, events: Subscriptions) -> None:
    """Let an arm decide where a library has a precision of its own; under `script` what it logs is noted."""
    modules = {name: follow for library in LIBRARIES for name, follow in library.MODULES.items()}
    imports = ImportHook(
        {name: functools.partial(follow, name, context, events) for name, follow in modules.items()}
    )
    events.call_at_end(imports.end)
    imports.begin()
