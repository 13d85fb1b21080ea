"""Which names of a module mean something of Apex or torch, by its imports, wherever they stand."""

import ast
from collections.abc import Iterator

from ampcompare.source.amp_names import APEX, ROOTS
from ampcompare.source.module import Module
from ampcompare.source.syntax import ImportNode


class ModuleImports:
    """The imports of a module.

    Attributes:
        imports: of Apex: the statement and the alias; the alias of a star import is "*".
        uses: expressions that mean something of Apex, each the widest attribute chain, with its full name.
        modules: names of imported modules that are neither Apex nor torch.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self.imports: list[tuple[ImportNode, ast.alias]] = [
            (node, alias) for node, alias, full in module.imports if full.split(".")[0] in APEX
        ]
        bound = [pair for scope in module.scopes for pair in scope.imports.items()]
        self.modules = {name for name, full in bound if not any(one.split(".")[0] in ROOTS for one in full)}
        self.uses: list[tuple[ast.Name | ast.Attribute, str]] = list(self._uses_with_full_names())

    def full_name_of(self, node: ast.AST | None) -> str | None:
        """Return the full name of an expression; None if it is not imported from Apex or torch."""
        full = None if node is None else self.module.resolve(node, follow=False)
        return full if full is not None and full.split(".")[0] in ROOTS else None

    def _uses_with_full_names(self) -> Iterator[tuple[ast.Name | ast.Attribute, str]]:
        for node in self.module.nodes:
            if not isinstance(node, (ast.Name, ast.Attribute)):
                continue
            if isinstance(self.module.parent(node), ast.Attribute):
                continue  # a part of a wider chain
            if isinstance(node.ctx, ast.Store) and isinstance(self.module.scope_of[node].node, ast.ClassDef):
                continue  # such as a member of an enumeration
            chain: ast.AST = node
            while isinstance(chain, ast.Attribute) and self.full_name_of(chain) is None:
                chain = chain.value  # such as `amp.master_params(x).y`, which goes through a call
            if not isinstance(chain, (ast.Name, ast.Attribute)):
                continue
            meaning = self.full_name_of(chain)
            if meaning is not None and not meaning.startswith("torch"):
                yield chain, meaning
