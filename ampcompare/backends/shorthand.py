"""Short ways to write an arm, such as `bf16`, `amp` or `o2`, and several arms in one text."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ampcompare.backends.catalog import BUILT_IN, find_spec, third_party_backends

__all__ = ["SHORTHANDS", "SplitText", "full_name", "split_arms", "split_backend"]

SHORTHANDS = {word: arm for spec in BUILT_IN.values() for word, arm in spec.shorthands.items()}
LEVEL = re.compile(r"[Oo0][0-9]")  # also 02 and O4, so that the message is about the level
HEAD_END = re.compile("[:,]")


@dataclass(frozen=True)
class SplitText:
    """A text taken apart into arms.

    Attributes:
        arms: the text of each.
        ambiguous: the first word that is read as an option and could be an arm too; "" if there is none.
    """

    arms: tuple[str, ...]
    ambiguous: str = ""


def full_name(head: str) -> str | None:
    """Return the backend, or the arm, that a word in any case names; None if it names none."""
    lowered = head.lower()
    if lowered in BUILT_IN:
        return lowered
    others = third_party_backends()
    if head in others:
        return head
    if lowered in SHORTHANDS:
        return SHORTHANDS[lowered]
    if LEVEL.fullmatch(head):
        return f"apex:{head}"
    return next((name for name in others if name.lower() == lowered), None)


def split_backend(text: str) -> tuple[str, str]:
    """Return the backend of one arm and its options, with a shorthand written out: `O2` gives apex and O2.

    An unknown backend is returned as it is written.
    """
    text = text.strip()
    end = HEAD_END.search(text)
    head, rest = (text, "") if end is None else (text[: end.start()], text[end.end() :])
    backend, _, option = (full_name(head.strip()) or head).partition(":")
    return backend, ",".join(filter(None, [option, rest]))


def split_arms(text: str) -> SplitText:
    """Split `fp32,bf16,apex:O2,loss_scale=128` into its arms: a word begins one unless it is an option of the last.

    After `half` a word such as `bf16` begins an arm. After `half:bn_fp32` it is an option, and ambiguous.
    """
    arms: list[list[str]] = []
    ambiguous = ""
    for word in filter(None, (word.strip() for word in text.split(","))):
        if not arms:
            arms.append([word])
            continue
        is_arm = _may_be_arm(word)
        is_option = _is_option(word, arms[-1][0])
        has_options = len(arms[-1]) > 1 or ":" in arms[-1][0]
        if is_arm and not (is_option and has_options):
            arms.append([word])
        else:
            arms[-1].append(word)
            ambiguous = ambiguous or (word if is_arm else "")
    return SplitText(tuple(",".join(words) for words in arms), ambiguous)


def _may_be_arm(word: str) -> bool:
    """Return whether a word is one by its form, `NAME:...`, or because it names one."""
    head, colon, _ = word.partition(":")
    return "=" not in head and (bool(colon) or full_name(head) is not None)


def _is_option(word: str, arm: str) -> bool:
    """Return whether the backend of an arm takes a word as an option."""
    spec = find_spec(split_backend(arm)[0])
    head, colon, _ = word.partition(":")
    if "=" in head or colon or spec is None:
        return "=" in head
    return spec.parsers is None or word in spec.parsers or word.lower() in spec.aliases
