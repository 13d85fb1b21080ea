"""The exceptions of ampcompare for its users; the package itself imports `base.errors`."""

from ampcompare.base.errors import *  # noqa: F403
from ampcompare.base.errors import __all__ as __all__
