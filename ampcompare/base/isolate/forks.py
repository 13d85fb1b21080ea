"""What the servers share that fork a process for each request: their messages, and how they follow the fork.

A message is a line of JSON with an `event`: `ready`, once; `begin` with the `pid` of the fork; `progress` with
`values`; `exit` with `code` and `signal`, one of which is 0. The end of the channel from the client ends both.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Callable
from typing import Any

__all__ = ["follow_fork", "send_event"]

POLL_SECONDS = 0.02


def send_event(channel: int, event: str, **facts: Any) -> None:
    """Write a message in one piece; below 4 KiB, those of server and fork never mix."""
    os.write(channel, (json.dumps({"event": event, **facts}) + "\n").encode())


def follow_fork(child: int, client: int, answers: int, kill: Callable[[int], None]) -> bool:
    """Report the exit of a fork; return False where the client is gone, after killing the fork.

    Args:
        client: channel from the client, which writes nothing while a fork runs.
        answers: channel to the client.
    """
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(BrokenPipeError):
                send_event(answers, "exit", code=max(code, 0), signal=max(-code, 0))
            return True
        readable, _, _ = select.select([client], [], [], POLL_SECONDS)
        if readable and _has_ended(client):
            kill(child)
            os.waitpid(child, 0)
            return False


def _has_ended(channel: int) -> bool:
    try:
        return not os.read(channel, 1)
    except ConnectionError:  # its other end was closed with messages unread
        return True
