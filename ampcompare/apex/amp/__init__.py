"""Apex's mixed precision: opt levels O0 to O3, loss scaling, O1's casts; O4 and O5 of ROCm's.

`_amp_state` is the state object of the session, which shadows the module of that name.

Source: Apex 25.05, `apex.amp`.
"""

from . import lists
from . import opt as opt  # available after `import apex.amp`, as in Apex
from . import utils as utils
from ._amp_state import _amp_state, master_params
from .amp import (
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontend import initialize, load_state_dict, state_dict
from .handle import disable_casts, scale_loss

__all__ = [
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
