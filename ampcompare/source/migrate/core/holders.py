"""Which names, attributes and items of a function may hold values of some kind, and from which place on."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ampcompare.source.module import Block, Module
from ampcompare.source.syntax import ForNode, FunctionNode, LoopNode, argument_values, last_name
from ampcompare.source.torch_methods import ADDING, WITH_INDICES, WRITING, receiver_of

Path: TypeAlias = tuple[str, ...]  # of a name, its attributes and its items: ("hyp", "['loss']")
Place: TypeAlias = tuple[int, int]
BEGIN: Place = (0, 0)


@dataclass(eq=False)
class Binding:
    """A place of the text that binds a name, an attribute or an item, or adds to it.

    Attributes:
        values: expressions, one of which it holds from then on.
        place: from which it does.
        within: the block or comprehension where nothing is left of what was there before; None where that stays.
    """

    path: Path
    values: list[ast.expr]
    place: Place
    within: Block | ast.AST | None = None
    holds: bool = False


def access_path_of(node: ast.AST | None) -> Path:
    """Return the path of a name, an attribute, or an item under a word; it is empty for any other expression."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if not isinstance(node, (ast.Attribute, ast.Subscript)) or not (path := access_path_of(node.value)):
        return ()
    if isinstance(node, ast.Attribute):
        return (*path, f".{node.attr}")
    word = node.slice.value if isinstance(node.slice, ast.Constant) else None
    return (*path, f"[{word!r}]") if isinstance(word, str) else ()


def items_bound_below(path: Path, bound_path: Path) -> Path | None:
    """Return which items of a path are bound by a binding: `()` for all of it, None for nothing of it."""
    if path[: len(bound_path)] == bound_path:
        return ()
    below = bound_path[len(path) :]
    return below if bound_path[: len(path)] == path and below[0].startswith("[") else None


class BindingsOfScope:
    """The bindings of a function, or of a module, in the order of the text.

    Args:
        seeds: what holds from the begin.
    """

    def __init__(self, module: Module, nodes: Iterable[ast.AST], seeds: Iterable[Path]) -> None:
        self._module = module
        self.bindings = [Binding(each, [], BEGIN, holds=True) for each in seeds]
        for node in nodes:
            self.bindings += self._bindings_at(node)
        self._of_name: defaultdict[str, list[Binding]] = defaultdict(list)
        for each in self.bindings:
            self._of_name[each.path[0]].append(each)

    def _bindings_at(self, node: ast.AST) -> Iterator[Binding]:
        targets: list[ast.expr] = []
        values: list[ast.expr] = []
        within: Block | ast.AST | None = None
        place = _end_of_node(node)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = [
                _target_of_values_not_indices(each, node.value) for each in _targets_of_assignment(node)
            ]
            values, within = [node.value] if node.value is not None else [], self._module.block_of(node)
        elif isinstance(node, (ast.AugAssign, ast.NamedExpr)):
            targets, values = [node.target], [node.value]
        elif isinstance(node, ForNode):
            targets = [node.target]
            values = [node.iter]
            place = _start_of_node(node.body[0])
            within = node.body
        elif isinstance(node, ast.comprehension):
            within = self._module.parent(node)
            targets = [node.target]
            values = [node.iter]
            place = _start_of_node(within)
        elif isinstance(node, ast.Call) and (changed := receiver_of(node, ADDING | WRITING)) is not None:
            targets, values = [changed], argument_values(node)
        for target in targets if values else []:
            for path, is_whole in _bound_paths_and_is_whole(target):
                yield Binding(path, values, place, within if is_whole else None)

    def items_held_at(self, path: Path, node: ast.AST) -> set[Path]:
        """Return which items of a path hold something where a node stands; `()` stands for the whole of it."""
        found = set()
        for each in self._of_name.get(path[0], ()):
            parts = items_bound_below(path, each.path) if each.holds else None
            if (
                parts is not None
                and parts not in found
                and self._binding_reaches(each, max(path, each.path, key=len), node)
            ):
                found.add(parts)
        return found

    def _binding_reaches(self, binding: Binding, path: Path, node: ast.AST) -> bool:
        """Return whether what is bound may still be there where a node stands, in a later round of a loop too."""
        module, place = self._module, _start_of_node(node)
        around = [node, *module.ancestors_up_to_function(node)]
        statements = [
            each for each in around if isinstance(each, ast.stmt) and not isinstance(each, FunctionNode)
        ]
        inside = {*map(id, around), *(id(module.block_of(each)) for each in statements)}
        last = max(
            (
                each.place
                for each in self._of_name[path[0]]
                if each.place <= place
                and id(each.within) in inside
                and items_bound_below(path, each.path) == ()
            ),
            default=BEGIN,
        )
        if binding.place <= place:
            return binding.place >= last
        loops = (each for each in around if isinstance(each, LoopNode))
        both = next(
            (each for each in loops if _start_of_node(each) <= binding.place <= _end_of_node(each)), None
        )
        return both is not None and last < _start_of_node(both)


def _targets_of_assignment(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _target_of_values_not_indices(target: ast.expr, value: ast.expr | None) -> ast.expr:
    """Return the part of a target that gets numbers, where the other one gets their indices."""
    if (
        isinstance(target, ast.Tuple)
        and len(target.elts) == 2
        and value is not None
        and returns_values_and_indices(value)
    ):
        return target.elts[0]
    return target


def returns_values_and_indices(node: ast.expr) -> bool:
    """Return whether an expression is a call of what returns numbers and their indices."""
    return isinstance(node, ast.Call) and last_name(node.func) in WITH_INDICES


def _bound_paths_and_is_whole(target: ast.AST) -> Iterator[tuple[Path, bool]]:
    """Yield the paths that a target binds, and whether it binds all of each."""
    if isinstance(target, (ast.Tuple, ast.List)):
        for each in target.elts:
            yield from _bound_paths_and_is_whole(each)
        return
    is_whole = True
    while not access_path_of(target) and isinstance(target, (ast.Attribute, ast.Subscript, ast.Starred)):
        is_whole = is_whole and isinstance(target, ast.Starred)
        target = target.value
    if (path := access_path_of(target)) and path != ("self",):
        yield path, is_whole


def _start_of_node(node: ast.AST) -> Place:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _end_of_node(node: ast.AST) -> Place:
    return getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)
