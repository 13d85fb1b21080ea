"""Recognize the errors of scripts for earlier versions of torch, numpy and Python that `--compat-torch` prevents."""

import re

COMPAT_HINT = "the script may be written for an earlier version of torch or Python; try --compat-torch"
MESSAGES = re.compile(
    r"Found dtype Long but expected Float"  # torch.full of an integer, in a loss
    r"|result type Float can't be cast to"
    r"|Weights only load failed"
    r"|module 'numpy' has no attribute|`np\.\w+` was removed in the NumPy"
    r"|cannot import name '\w+' from '(collections|fractions|torch\.nn\._functions|torch\._six)'"
    r"|module 'collections' has no attribute|module 'time' has no attribute 'clock'"
    r"|No module named 'torch\._six'"
    r"|Iter' object has no attribute 'next'"
    r"|Subtraction, the `-` operator, with (a|two) bool tensor"
    r"|view size is not compatible with input tensor"
)


def may_compat_torch_prevent(message: str | None) -> bool:
    """Return whether an error, with the name of its class, is one that `--compat-torch` may prevent."""
    return MESSAGES.search(message or "") is not None
