"""Keep replaced functions usable in `torch.jit.script`, which looks operators up by the function object."""

from __future__ import annotations

from typing import Any

__all__ = ["keep_for_jit"]


def keep_for_jit(original: Any, replacement: Any) -> None:
    """Let `torch.jit.script` compile a call of `replacement` as the operator that `original` is."""
    from torch.jit import _builtins

    operator = _builtins._find_builtin(original)
    if operator is not None:
        _builtins._register_builtin(replacement, operator)
