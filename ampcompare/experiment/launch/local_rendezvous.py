"""The rendezvous of torchrun's agent on one machine: the only agent, so that it opens no port."""

from datetime import timedelta

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "ampcompare-local"
BARRIER_SECONDS = 300


class _LocalRendezvous(RendezvousHandler):
    """A rendezvous of one agent, whose store is in the memory of this process.

    torchrun's c10d rendezvous unpickles data from a store that listens on all interfaces.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False
        self._store = HashStore()
        self._store.set_timeout(timedelta(seconds=BARRIER_SECONDS))

    @property
    def use_agent_store(self) -> bool:
        return False

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        # Ranks do not use this address, but `DistributedEnv.url`.
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return _LocalRendezvous(parameters.run_id)


def register() -> None:
    """Register the rendezvous with torchrun as `BACKEND`."""
    rendezvous_handler_registry.register(BACKEND, _create)
