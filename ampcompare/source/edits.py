"""Edits of a source text at positions of its tree: what is not edited keeps every byte.

Those of `Edits` are made by statement, as rewriting and fixes ask for them; what is left is a list of `Edit`.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from ampcompare.source.module import Module


@dataclass(frozen=True, order=True)
class Edit:
    """A piece of the text that is replaced, by offsets in characters."""

    start: int
    end: int
    text: str


@dataclass
class _EditedLine:
    """What happens to a line of the source.

    Attributes:
        deeper: how many units of indentation it gets.
        cut: the part of its indentation that goes.
        before: statements above it, each with the number of `deeper` that was there before.
        after: statements below the last line of a statement.
    """

    deeper: int = 0
    cut: list[tuple[str, str]] = field(default_factory=list)
    before: list[tuple[int, int, str]] = field(default_factory=list)
    after: list[tuple[int, str]] = field(default_factory=list)


class Edits:
    """A set of edits; later ones inside the span of an earlier replacement are lost, those around it win.

    Attributes:
        shared: statements that share their lines with others; the edits are whole once these have lines of their own.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.shared: set[ast.stmt] = set()
        self._lines: dict[int, _EditedLine] = {}
        self._spans: dict[tuple[int, int], str | list[str]] = {}
        self._removed: set[ast.stmt] = set()
        self._strings: set[int] | None = None
        self._unwrapped: dict[ast.stmt, int] = {}

    def __bool__(self) -> bool:
        return bool(self._lines or self._spans or self._removed)

    def _line_of_number(self, number: int) -> _EditedLine:
        return self._lines.setdefault(number, _EditedLine())

    def replace(self, node: ast.AST, text: str) -> None:
        """Replace an expression."""
        self._spans[self.module.span(node)] = text

    def replace_span(self, start: int, end: int, text: str) -> None:
        """Replace characters of the text."""
        self._spans[(start, end)] = text

    def replace_statement(self, statement: ast.stmt, lines: list[str]) -> None:
        """Replace a statement by others, which are given without the indentation of the block."""
        if not lines:
            self.remove(statement)
            return
        self._spans[self.module.span(statement)] = list(lines)
        if not self.module.is_alone_on_lines(statement):
            self.shared.add(statement)

    def remove(self, statement: ast.stmt) -> None:
        """Remove a statement; a block that it leaves empty gets a `pass`, or goes with it."""
        self._removed.add(statement)
        if not self.module.is_alone_on_lines(statement):
            self.shared.add(statement)

    def is_removed(self, statement: ast.stmt) -> bool:
        """Return whether a statement goes."""
        return statement in self._removed

    def insert_above(self, statement: ast.stmt, lines: Iterable[str], *, outside: bool = False) -> None:
        """Put statements above another; for an `elif`, above the `if` that it belongs to.

        Args:
            lines: without the indentation of the block.
            outside: above a `with` that the statement was wrapped in.
        """
        while self.module.is_elif(statement):
            statement = self.module.parent(statement)  # type: ignore[assignment]
        if not self.module.begins_line(statement):
            self.shared.add(statement)
            return
        line = self._line_of_number(self._unwrapped.get(statement, self.module.first_line(statement)))
        line.before += [(0 if outside else line.deeper, 1, text) for text in lines]

    def insert_below(self, statement: ast.stmt, lines: Iterable[str]) -> None:
        """Put statements below another."""
        end = statement.end_lineno or statement.lineno
        if not self.module.is_alone_on_lines(statement):
            self.shared.add(statement)
            return
        first = self.module.first_line(statement)
        self._line_of_number(end).after += [(first, text) for text in lines]

    def inserted_text(self) -> str:
        """Return all texts that the edits put in."""
        texts = ["\n".join(text) if isinstance(text, list) else text for text in self._spans.values()]
        for line in self._lines.values():
            texts += [text for _, _, text in line.before] + [text for _, text in line.after]
        return "\n".join(texts)

    def put_under_header(self, first: ast.stmt, last: ast.stmt, header: str) -> None:
        """Put statements of one block below a header such as `with ...:`."""
        begin, end = self.module.first_line(first), last.end_lineno or last.lineno
        self.shared |= {each for each in (first, last) if not self.module.is_alone_on_lines(each)}
        line = self._line_of_number(begin)
        line.before.append((line.deeper, 0, header))
        for number in range(begin, end + 1):
            if number not in self._lines_inside_strings():
                self._line_of_number(number).deeper += 1

    def replace_statement_by_body(
        self, statement: ast.stmt, body: list[ast.stmt], lines: Iterable[str] = ()
    ) -> None:
        """Replace a compound statement by some of its statements, one step to the left, below new lines.

        Args:
            body: a block of the statement; what else it holds goes.
        """
        module = self.module
        if not module.is_alone_on_lines(body[0]):  # on the line of the header
            self.shared.add(body[0])
            return
        outer, inner = module.indent(statement), module.indent(body[0])
        top, begin = module.first_line(statement), self._block_start_line(statement, body)
        end = body[-1].end_lineno or body[-1].lineno
        self._spans[(module.starts[top - 1], module.starts[begin - 1])] = ""
        self._unwrapped[statement] = begin
        self._line_of_number(top)
        moved = self._lines.pop(top)
        last = statement.end_lineno or statement.lineno
        if last > end:
            stop = module.line_start(last + 1)
            self._spans[(module.starts[end], stop)] = ""
        for number in range(begin, end + 1):
            if number not in self._lines_inside_strings():
                self._line_of_number(number).cut.append((inner, outer))
        line = self._line_of_number(begin)
        line.before = moved.before + [(moved.deeper, 1, text) for text in lines] + line.before
        if last > end and last in self._lines:
            self._line_of_number(end).after += self._lines[last].after

    def _block_start_line(self, statement: ast.stmt, body: list[ast.stmt]) -> int:
        """Return where a block begins, with the comments above its first statement."""
        module = self.module
        line, top = module.first_line(body[0]), module.first_line(statement)
        while line - 1 > top and module.line_text(line - 1).lstrip().startswith("#"):
            line -= 1
        return line

    def _lines_inside_strings(self) -> set[int]:
        """Return the lines that begin inside a string, whose text is not indentation."""
        if self._strings is None:
            self._strings = set()
            for node in self.module.nodes:
                is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
                if (is_text or isinstance(node, ast.JoinedStr)) and node.end_lineno != node.lineno:  # type: ignore[attr-defined]
                    self._strings.update(range(node.lineno + 1, node.end_lineno + 1))  # type: ignore[attr-defined]
        return self._strings

    def _new_indentation_of_line(self, number: int, deeper: int | None = None) -> str:
        """Return the new indentation of a line."""
        old = self.module.line_indent(number)
        line = self._lines.get(number)
        if line is None:
            return old
        for inner, outer in reversed(line.cut):
            if old.startswith(inner):
                old = outer + old[len(inner) :]
        return self.module.indentation_unit * (line.deeper if deeper is None else deeper) + old

    def edited_text(self) -> str:
        """Return the text with all edits."""
        return apply_edits(self.module.text, [(edit,) for edit in self.sorted_edits()])[0]

    def sorted_edits(self) -> tuple[Edit, ...]:
        """Return all edits by position, the widest first where several begin together, after what is put above it."""
        self._make_spans_of_removed()
        module, newline = self.module, self.module.newline
        spans = {span: text for span, text in self._spans.items() if isinstance(text, str)}
        for (start, end), text in self._spans.items():
            if isinstance(text, list):
                number = module.line_at(start)
                spans[(start, end)] = newline.join(
                    [text[0], *(each and self._new_indentation_of_line(number) + each for each in text[1:])]
                )
        for number, line in sorted(self._lines.items()):
            begin = module.starts[number - 1]
            text, old = module.line_text(number), module.line_indent(number)
            lines = [
                (content and self._new_indentation_of_line(number, deeper) + content) + newline
                for deeper, _, content in line.before
            ]
            kept = old if not text.strip() else self._new_indentation_of_line(number)
            if lines or kept != old:
                same = kept == old
                self._add_text_to_spans(
                    spans, begin, begin if same else begin + len(old), "".join(lines) + ("" if same else kept)
                )
            if line.after:
                stop = begin + len(text)
                ends = text.endswith(("\n", "\r"))
                inner_first = sorted(line.after, key=lambda each: -each[0])  # of statements that end together
                below = [
                    content and self._new_indentation_of_line(first) + content
                    for first, content in inner_first
                ]
                joined = (
                    "".join(f"{each}{newline}" for each in below) if ends else newline + newline.join(below)
                )
                self._add_text_to_spans(spans, stop, stop, joined)
        edits = [Edit(start, end, text) for (start, end), text in spans.items()]
        return tuple(sorted(edits, key=lambda edit: (edit.start, edit.end != edit.start, -edit.end)))

    @staticmethod
    def _add_text_to_spans(spans: dict[tuple[int, int], str], start: int, end: int, text: str) -> None:
        spans[(start, end)] = spans.get((start, end), "") + text

    def _make_spans_of_removed(self) -> None:
        """Turn removed statements into spans; what would leave a block empty goes too, or becomes `pass`."""
        module = self.module
        changed = True
        while changed:
            changed = False
            for statement in list(self._removed):
                parent = module.parent(statement)
                if not isinstance(parent, (ast.If, ast.With)) or parent in self._removed:
                    continue
                if all(each in self._removed for block in module.child_blocks(parent) for each in block):
                    self._removed.add(parent)
                    changed = True
        for statement in self._removed:
            if any(outer in self._removed for outer in module.ancestors(statement)):
                continue
            block = module.block_of(statement)
            kept = [each for each in block if each not in self._removed]
            if not kept and not isinstance(module.parent(statement), ast.Module) and statement is block[-1]:
                self._spans[module.span(statement)] = "pass"
            elif module.is_alone_on_lines(statement):
                self._remove_lines_of(statement)

    def _remove_lines_of(self, statement: ast.stmt) -> None:
        module = self.module
        first, last = module.first_line(statement), statement.end_lineno or statement.lineno
        stop = module.line_start(last + 1)
        above = first - 1  # as many blank lines remain as the longer run around the statement had
        while (
            above >= 1
            and last + 1 < len(module.starts)
            and not (module.line_text(above) + module.line_text(last + 1)).strip()
        ):
            above, last = above - 1, last + 1
            stop = module.line_start(last + 1)
        if module.block_of(statement)[0] is statement and not isinstance(
            module.parent(statement), ast.Module
        ):
            while (
                last + 1 < len(module.starts) and not module.line_text(last + 1).strip()
            ):  # a block begins without them
                last += 1
                stop = module.line_start(last + 1)
        moved = self._lines.pop(first, None)
        self._spans[(module.starts[first - 1], stop)] = ""
        if moved is not None and moved.before:
            indent = module.indent(statement)
            text = "".join(
                f"{content and indent + content}{module.newline}" for _, _, content in moved.before
            )
            self._spans[(module.starts[first - 1], stop)] = text


def text_with_statements_on_own_lines(module: Module, statements: Iterable[ast.stmt]) -> str:
    """Return the text of a module with statements, and those that share a line with them, on lines of their own."""
    edits: dict[Edit, None] = {}
    for statement in statements:
        block = module.block_of(statement)
        lines = {statement.lineno, statement.end_lineno}
        near = [each for each in block if {each.lineno, each.end_lineno} & lines]
        first = block[0]
        indent = module.indent(first)
        if not module.begins_line(first):  # it stands behind the head of its block
            indent = module.indent(module.parent(first)) + module.indentation_unit
        for each in near:
            start = module.start_of(each)
            if not module.begins_line(each):
                begin = len(module.text[:start].rstrip(" \t;"))
                edits[Edit(begin, start, module.newline + indent)] = None
        stop = module.end_of(near[-1])
        tail = module.text[stop : module.line_start((near[-1].end_lineno or 0) + 1)]
        rest = tail.lstrip(" \t;")
        gap = tail.removesuffix(rest)
        if rest.startswith("#"):  # the space before a comment stays
            gap = gap[: gap.rfind(";") + 1]
        if not rest or rest[0] in "#\r\n":
            edits[Edit(stop, stop + len(gap), "")] = None
    return apply_edits(module.text, [tuple(edits)])[0]


def apply_edits(text: str, groups: Iterable[tuple[Edit, ...]]) -> tuple[str, list[tuple[Edit, ...]]]:
    """Return the text after the edits, and the groups that were applied: those that overlap no earlier one."""
    taken: dict[Edit, None] = {}
    applied = []
    for group in groups:
        new = [edit for edit in group if edit not in taken]
        if any(_do_overlap(edit, other) for edit in new for other in taken):
            continue
        taken.update(dict.fromkeys(new))
        applied.append(group)
    for edit in sorted(taken, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text, applied


def _do_overlap(one: Edit, other: Edit) -> bool:
    if one.start == one.end and other.start == other.end:
        return one.start == other.start
    return one.start < other.end and other.start < one.end
