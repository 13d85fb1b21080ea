"""What the rewriting of the core of a module works on, and the words of its target."""

import ast
from dataclasses import dataclass, field

from ampcompare.source.edits import Edits
from ampcompare.source.index import Index
from ampcompare.source.migrate.core.scalers import Scaler
from ampcompare.source.migrate.finding import NOTE, Finding
from ampcompare.source.migrate.read.forward import Forward
from ampcompare.source.migrate.read.names import Names
from ampcompare.source.migrate.read.neighbors import Around
from ampcompare.source.migrate.read.order import Order
from ampcompare.source.migrate.read.sites import Sites
from ampcompare.source.module import Function, Module


@dataclass
class Core:
    """A core that can be rewritten; `rewrite_core` fills it.

    Attributes:
        around: what other modules have to do with it.
        edits: gets the changes.
        torch: the name by which the module knows torch.
        findings: notes on what differs.
        unscaled: steps (by `id` of the call) above which gradients are unscaled whether it runs or not.
    """

    module: Module
    index: Index
    around: Around
    names: Names
    edits: Edits
    torch: str
    sites: Sites
    planned: Scaler
    order: Order
    forward: Forward
    findings: list[Finding] = field(default_factory=list)
    always: bool = False
    update: str = ""
    declared: set[Function] = field(default_factory=set)
    has_global: bool = False
    made: dict[ast.Call, list[str]] = field(default_factory=dict)
    defaults: set[ast.stmt] = field(default_factory=set)
    bracketed: set[ast.stmt] = field(default_factory=set)
    unscaled: set[int] = field(default_factory=set)

    @property
    def is_off(self) -> bool:
        """Whether all is in fp32, at O0 alone."""
        levels = [each.arguments.get("opt_level") for each in self.sites.initializes]
        return bool(levels) and all(isinstance(each, ast.Constant) and each.value == "O0" for each in levels)

    @property
    def off(self) -> str:
        """The expression for a scaler that does nothing."""
        return f'{self.torch}.amp.GradScaler("cuda", enabled=False)'

    def note(self, node: ast.AST, message: str) -> None:
        """Add a note on the line of a node."""
        self.findings.append(Finding.at(node, NOTE, message))

    @property
    def scaler(self) -> str:
        """The expression for the scaler."""
        return self.planned.expression

    def is_without_casts(self, node: ast.AST) -> bool:
        """Return whether a place is in a block of `amp.disable_casts`, in which autocast stays off."""
        blocks = (each for each in self.module.ancestors(node) if isinstance(each, ast.With))
        calls = (item.context_expr for each in blocks for item in each.items if isinstance(item.context_expr, ast.Call))
        return any(self.names.meaning(each.func) == "apex.amp.disable_casts" for each in calls)

    @property
    def autocast(self) -> str:
        """The `with` line for a forward pass."""
        enabled = "" if self.always else f", enabled={self.scaler}.is_enabled()"
        return f'with {self.torch}.autocast("cuda", dtype={self.torch}.float16{enabled}):'
