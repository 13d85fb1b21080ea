"""Version of the amp interface, as Apex numbers it."""

__all__ = ["VERSION", "__version__"]

VERSION = (0, 1, 0)
__version__ = ".".join(map(str, VERSION))
