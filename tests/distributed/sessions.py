"""Training on ranks without a launcher: the session of a configuration, as a cell makes it."""

import torch

from ampcompare.settings.config import RunConfig
from ampcompare.tasks.task import make_task
from ampcompare.training.assemble import assemble, make_parallel
from ampcompare.training.parallel.ranks import Communicator, ProcessGroup
from ampcompare.training.precision.base import make_precision
from ampcompare.training.session import Session

CPU = torch.device("cpu")


def make_session(config: RunConfig) -> Session:
    """Return the session of this rank, one of as many as the configuration has processes."""
    ranks = ProcessGroup(CPU) if config.processes > 1 else Communicator()
    precision = make_precision(config.arm, device="cpu")
    parallel = make_parallel(config.parallel, CPU, precision.engine.name if precision.engine else None)
    return Session(
        config, assemble(config.recipe, make_task(config.recipe), precision, CPU, parallel=parallel, ranks=ranks)
    )
