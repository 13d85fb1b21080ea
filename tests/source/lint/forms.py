"""Scripts with a mistake and without it, for the tests of the forms that mistakes have."""

import re
from textwrap import dedent

from ampcompare.source.lint.check import check_text


def codes_of(text: str) -> list[str]:
    """Return the codes that are reported by default, without that of importing Apex."""
    head = "import torch\n" + "from apex import amp\n" * (re.search(r"(?<!torch\.)\bamp\.", text) is not None)
    found = [finding.code for finding in check_text(head + dedent(text))]
    return [code for code in found if code != "AMP301"]


def codes_of_pair(script: str) -> tuple[list[str], list[str]]:
    """Return the codes of a script with the mistake, in lines marked `# wrong`, and with those marked `# right`."""
    wrong, right = (
        "\n".join(
            line.removesuffix(f"  # {kept}") for line in script.splitlines() if not line.endswith(f"# {left}")
        )
        for kept, left in (("wrong", "right"), ("right", "wrong"))
    )
    return codes_of(wrong), codes_of(right)
