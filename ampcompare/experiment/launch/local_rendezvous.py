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
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

BACKEND = "ampcompare-local"
BARRIER_SECONDS = 300
NOWHERE = ("127.0.0.1", 0)  # ranks use `DistributedEnv.url`


class _LocalRendezvous(StaticTCPRendezvous):
    """A rendezvous of one agent, whose store is in the memory of this process.

    torchrun's own stores listen on all interfaces, and its c10d rendezvous unpickles data from there.
    """

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        store = HashStore()
        store.set_timeout(timedelta(seconds=BARRIER_SECONDS))
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(*NOWHERE))


def _make_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    return _LocalRendezvous(*NOWHERE, 0, 1, parameters.run_id, BARRIER_SECONDS)


def register_rendezvous() -> None:
    """Register the rendezvous with torchrun as `BACKEND`."""
    rendezvous_handler_registry.register(BACKEND, _make_rendezvous)
