"""The tables for a paper: `tabular` environments that need the package booktabs."""

from ampcompare.base.formatting import printable_line
from ampcompare.results.report.base import MAX_LINE, Reporter
from ampcompare.results.report.document import Document, Table, Text

SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
        "±": r"$\pm$",
        "Δ": r"$\Delta$",
        "≤": r"$\leq$",
        **{char: f"\\{char}" for char in "&%$#_{}"},
    }
)


def _escape_latex(text: str) -> str:
    return printable_line(text, MAX_LINE).translate(SPECIAL)


def _table_environment(table: Table, title: str) -> str:
    """Return a table environment, captioned with its legend or else the title of its section."""
    caption = " ".join([*([f"{table.title}."] if table.title else []), *table.legend]) or title
    sides = "".join("r" if column.numeric else "l" for column in table.columns)
    head, *rows = (" & ".join(map(_escape_latex, row)) + r" \\" for row in [table.heads, *table.texts])
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{_escape_latex(caption)}}}",
            rf"\begin{{tabular}}{{{sides}}}",
            r"\toprule",
            head,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


class Latex(Reporter):
    """The tables, without the notes of rows; sentences are comments, since the text is the author's."""

    def document_text(self, document: Document) -> str:
        blocks = [
            (block, section.title)
            for section in document.sections_in_format("latex")
            for block in section.blocks
        ]
        sentences = [
            sentence for block, _ in blocks if isinstance(block, Text) for sentence in block.sentences
        ]
        comments = [
            "needs \\usepackage{booktabs}",
            *(printable_line(sentence, MAX_LINE) for sentence in sentences),
        ]
        tables = [_table_environment(block, title) for block, title in blocks if isinstance(block, Table)]
        return "\n\n".join(["\n".join(f"% {text}" for text in comments), *tables]) + "\n"
