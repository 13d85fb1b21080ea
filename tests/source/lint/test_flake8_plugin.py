"""The plugin of flake8."""

from __future__ import annotations

import ast

from ampcompare.source.lint.flake8_plugin import Flake8Plugin


def test_what_flake8_gets() -> None:
    """Line, column, and a text that begins with the code; what does not parse is left to flake8."""
    lines = ["from apex import amp  # noqa\n", 'm, o = amp.initialize(m, o, opt_level="01")\n']

    found = list(Flake8Plugin(ast.parse("".join(lines)), lines).run())

    assert [(line, column, text[:7]) for line, column, text, _ in found] == [(2, 38, "AMP108 ")]
    assert list(Flake8Plugin(ast.parse(""), ["import apex\n", "print 'x'\n"]).run()) == []
