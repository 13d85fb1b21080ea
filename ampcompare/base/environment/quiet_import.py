"""Imports of libraries without what they print and warn of."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_import"]


@contextmanager
def quiet_import() -> Iterator[None]:
    """Silence warnings and logs of a library and its dependencies while they are imported; users cannot act on them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
