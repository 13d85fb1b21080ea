"""Scripts that wait for `--local_rank` on the command line, where torchrun puts LOCAL_RANK into the environment."""

from __future__ import annotations

import argparse  # noqa: TID251 - the script's own parser is mended; ours is click
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from ampcompare.legacy.notes import note

__all__ = ["mend"]

SPELLINGS = ("--local_rank", "--local-rank")


def mend() -> None:
    """Let argparse find the local rank, if the script's parser knows such an option.

    torchrun passes none; `torch.distributed.launch` has written it with a hyphen since torch 2.0.
    """
    parse = argparse.ArgumentParser.parse_known_args

    @functools.wraps(parse)
    def parse_known_args(self: Any, args: Sequence[str] | None = None, namespace: Any = None, **kwargs: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        return parse(self, _with_local_rank(self, given), namespace, **kwargs)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def _with_local_rank(parser: Any, given: list[str]) -> list[str]:
    known = [spelling for spelling in SPELLINGS if spelling in parser._option_string_actions]
    if not known:
        return given
    for index, word in enumerate(given):
        name, equals, value = word.partition("=")
        if name in known:
            return given
        if name in SPELLINGS:
            note(f"{name} is given to the script as {known[0]}")
            return [*given[:index], known[0] + equals + value, *given[index + 1 :]]
    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        return given
    note(f"the script gets {known[0]} from LOCAL_RANK")
    return [f"{known[0]}={rank}", *given]
