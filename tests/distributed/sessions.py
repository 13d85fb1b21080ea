"""Training on ranks without a launcher: the session of a configuration, as a cell makes it."""

from pathlib import Path

import torch

from ampcompare.settings.config import RunConfig
from ampcompare.tasks.task import make_task
from ampcompare.training.assemble import assemble_run, make_parallel
from ampcompare.training.checkpoint.resume import find_checkpoint, state_to_resume_and_resumption
from ampcompare.training.checkpoint.saver import CheckpointSaver
from ampcompare.training.parallel.ranks import Communicator, ProcessGroup
from ampcompare.training.precision.base import make_precision
from ampcompare.training.run_summary import RunMetrics
from ampcompare.training.session import TrainingSession
from ampcompare.training.stop_request import StopRequest

CPU = torch.device("cpu")


def make_session(config: RunConfig, folder: str | None = None, stop: int | None = None) -> TrainingSession:
    """Return the session of this rank, from the newest checkpoint of the folder if there is one; it saves there."""
    ranks = ProcessGroup(CPU) if config.processes > 1 else Communicator()
    found = None if folder is None else find_checkpoint("auto", Path(folder))
    precision = make_precision(config.arm, device="cpu")
    parallel = make_parallel(config.parallel, CPU, precision.engine.name if precision.engine else None)
    state = None if found is None else found.state
    task = make_task(config.recipe)
    assembly = assemble_run(config.recipe, task, precision, CPU, parallel=parallel, ranks=ranks, state=state)
    saver = None if folder is None else CheckpointSaver(Path(folder), config.saving)
    session = TrainingSession(config, assembly, saver=saver, stop=StopRequest(stop))
    session.stateful["tally"] = RunMetrics(config.warmup_steps, config.recipe.batch_size * ranks.size)
    if found is not None:
        session.load_state_dict(*state_to_resume_and_resumption(found, config, ranks.size))
    return session
