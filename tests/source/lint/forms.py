"""Scripts with a mistake and without it, for the tests of the forms that mistakes have."""

from __future__ import annotations

from textwrap import dedent

from ampcompare.source.lint.catalog import CODES
from ampcompare.source.lint.check import check_text

__all__ = ["codes_of", "codes_of_pair"]


def codes_of(text: str) -> list[str]:
    """Return the codes that are reported by default, without that of importing Apex."""
    found = [finding.code for finding in check_text("import torch\n" + dedent(text)) if CODES[finding.code].by_default]
    return [code for code in found if code != "AMP301"]


def codes_of_pair(script: str, good: str, bad: str) -> tuple[list[str], list[str]]:
    """Return the codes of a script with the mistake, and with its correction.

    Args:
        script: with the places `{good}`, `{good_too}`, `{good_else}` and `{bad}`.
        good: what stands in its place where the script is right.
        bad: what stands in its place where it is wrong.
    """
    empty = {"good": "", "bad": "", "good_too": "", "good_else": ""}
    corrected = {
        "good": good,
        "good_too": "part.load_state_dict(state[name])",
        "good_else": "DDP = torch.nn.parallel.DistributedDataParallel",
    }
    return codes_of(script.format(**{**empty, "bad": bad})), codes_of(script.format(**{**empty, **corrected}))
