"""Edits of a text by statement."""

from ampcompare.source.edits import Edits
from ampcompare.source.module import Module


def test_what_is_put_below_statements_that_end_together_stays_in_their_blocks() -> None:
    """In whatever order it is put there: what belongs to the inner one comes first."""
    module = Module("for a in b:\n    for c in d:\n        e()\n")
    outer = module.tree.body[0]
    middle = outer.body[0]
    for order in ((outer, middle, middle.body[0]), (middle.body[0], outer, middle)):
        edits = Edits(module)
        for each in order:
            edits.insert_below(each, [f"below_{each.lineno}()", f"again_{each.lineno}()"])
        assert edits.edited_text() == (
            "for a in b:\n    for c in d:\n        e()\n        below_3()\n        again_3()\n"
            "    below_2()\n    again_2()\nbelow_1()\nagain_1()\n"
        )
