"""Structured sparsity, which this package does not offer: `ASP` can be imported, and raises when it is used."""

from __future__ import annotations

from ampcompare.apex.contrib.sparsity.asp import ASP

__all__ = ["ASP"]
