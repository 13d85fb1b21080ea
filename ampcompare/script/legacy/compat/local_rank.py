"""Scripts that expect `--local_rank` on the command line, while torchrun sets LOCAL_RANK in the environment."""

from __future__ import annotations

import argparse  # noqa: TID251 - the script's own parser is patched; ampcompare uses click
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from ampcompare.script.legacy.stderr import note

__all__ = ["patch"]

SPELLINGS = ("--local_rank", "--local-rank")


def patch() -> None:
    """Pass the local rank to argparse, if the script's parser has such an option.

    torchrun passes none; `torch.distributed.launch` has written it with a hyphen since torch 2.0.
    """
    parse = argparse.ArgumentParser.parse_known_args

    @functools.wraps(parse)
    def parse_known_args(self: Any, args: Sequence[str] | None = None, namespace: Any = None, **kwargs: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        return parse(self, _with_local_rank(self, given), namespace, **kwargs)

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign, assignment]


def _with_local_rank(parser: Any, given: list[str]) -> list[str]:
    accepted = [spelling for spelling in SPELLINGS if spelling in parser._option_string_actions]
    if not accepted:
        return given
    for index, argument in enumerate(given):
        name, equals, value = argument.partition("=")
        if name in accepted:
            return given
        if name in SPELLINGS:
            note(f"{name} is passed to the script as {accepted[0]}")
            return [*given[:index], accepted[0] + equals + value, *given[index + 1 :]]
    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        return given
    note(f"the script gets {accepted[0]} from LOCAL_RANK")
    return [f"{accepted[0]}={rank}", *given]
