"""Which module and which line of the user's code an operation belongs to, in the forward and the backward pass."""

import linecache
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ampcompare.results.records.diagnosis import Phase

PACKAGE = str(Path(__file__).resolve().parents[1])
ROOMS = ("apex", "base", "diagnosis", "guards", "script", "settings", "training")
HIDDEN = (
    *{os.path.dirname(name) + os.sep for name in (torch.__file__, os.path.realpath(torch.__file__))},
    *(os.path.join(PACKAGE, room) + os.sep for room in ROOMS),
    os.path.join(PACKAGE, "testing") + os.sep,
)


@lru_cache(maxsize=4096)
def _shown_file_of_code(name: str) -> str | None:
    """Return the file of a frame's code as it is shown; None for code of torch and of ampcompare's engines."""
    if (
        name.startswith(("<frozen", "<string"))
        or name.startswith(HIDDEN)
        or os.path.basename(name) == "contextlib.py"
    ):
        return None
    if os.path.basename(os.path.dirname(name)).startswith("ipykernel_"):
        return _notebook_cell_text(name)
    roots = [os.getcwd(), *sorted(filter(None, sys.path), key=len, reverse=True)]
    for root in roots:
        if name.startswith(root + os.sep):
            return name[len(root) + 1 :]
    return name


def _notebook_cell_text(name: str) -> str:
    """Return a notebook's cell as the notebook shows it, such as In[3], for the file that its kernel compiles it as."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    number = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(name)
    if number is None:
        return name
    shown = f"In[{number}]"
    lines = linecache.getlines(name)
    # a cure shows the line that it is about
    linecache.cache[shown] = (sum(map(len, lines)), None, lines, shown)
    return shown


def location_text_of_frame(frame: FrameType) -> str:
    """Return file:line of a frame of the user's or the model's code; "" for another one."""
    name = _shown_file_of_code(frame.f_code.co_filename)
    return "" if name is None else f"{name}:{frame.f_lineno}"


def nearest_user_location_text(frame: FrameType | None) -> str:
    """Return file:line of the nearest frame of the user's or the model's code; "" if there is none."""
    while frame is not None:
        if line := location_text_of_frame(frame):
            return line
        frame = frame.f_back
    return ""


class RunningModulesTracker:
    """Keeps the stack of running modules, and where each autograd node was made.

    A node is known by its sequence number, which torch gives out before it runs the operation of the forward pass.
    """

    def __init__(self) -> None:
        self._order: dict[str, None] = {}
        self._models: list[tuple[str, nn.Module]] = []
        self._names: dict[int, str] = {}
        self._stack: list[str] = []
        self._made: dict[int, tuple[str, str]] = {}
        self._handles: list[Any] = []
        self._listed: dict[int, list[tuple[str, nn.Parameter]]] = {}  # parameters of this step, by model
        self._current_node: Callable[[], Any] = torch._C._current_autograd_node

    def name_modules(self, model: nn.Module, prefix: str = "", *, wrapper: str = "") -> None:
        """Give each module of a model its dotted name behind a prefix, without what `wrapper` matches."""
        self._models.append((prefix, model))
        self._names |= {
            id(module): f"{prefix}{re.sub(wrapper, '', name)}" for name, module in model.named_modules()
        }

    def named_parameters_of_step(self, only: nn.Module | None = None) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter of the models, or of one of them, with its name; they are listed once a step."""
        for at, (prefix, model) in enumerate(self._models):
            if only is not None and model is not only:
                continue
            if at not in self._listed:
                self._listed[at] = [(f"{prefix}{name}", param) for name, param in model.named_parameters()]
            yield from self._listed[at]

    def find_name_of_buffer(self, tensor: Tensor) -> str:
        """Return the name of the buffer of a model whose memory a tensor shows; "" for another tensor."""
        storage = tensor.untyped_storage()._cdata
        for prefix, model in self._models:
            for name, buffer in model.named_buffers():
                if buffer.untyped_storage()._cdata == storage:
                    return f"{prefix}{name}"
        return ""

    def hook_modules(self, models: Iterable[nn.Module]) -> None:
        """Install hooks on every module of `models`; several models have their place in front of their names."""
        models = list(models)
        for place, model in enumerate(models):
            self.name_modules(model, f"model{place}:" if len(models) > 1 else "")
            for module in model.modules():
                self._handles += [
                    module.register_forward_pre_hook(self.note_module_entered, prepend=True),
                    module.register_forward_hook(self.note_module_left, always_call=True),
                ]

    @property
    def models(self) -> list[nn.Module]:
        return [model for _, model in self._models]

    @property
    def modules_in_call_order(self) -> list[str]:
        """The names of modules in the order of their first call."""
        return list(self._order)

    @property
    def running_module(self) -> str:
        """The name of the innermost module that runs; "" outside of submodules."""
        return self._stack[-1] if self._stack else ""

    @property
    def is_inside_module(self) -> bool:
        return bool(self._stack)

    def has_module(self, module: nn.Module) -> bool:
        return id(module) in self._names

    def note_module_entered(self, module: nn.Module, *_arguments: Any) -> None:
        """Note that a module begins; one without a name belongs to the one around it."""
        name = self._names.get(id(module), self.running_module)
        self._stack.append(name)
        self._order.setdefault(name)

    def note_module_left(self, *_arguments: Any) -> None:
        if self._stack:
            self._stack.pop()

    def forget_step(self) -> None:
        """Forget the nodes of a step that is over."""
        self._made.clear()
        self._stack.clear()
        self._listed.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def module_location_and_phase(self) -> tuple[str, str, Phase]:
        """Return module, line and phase of the operation that is being dispatched."""
        node = None if self._stack else self._current_node()
        if node is None:
            number = torch._C._autograd._get_sequence_nr() - 1
            made = (self.running_module, nearest_user_location_text(sys._getframe(2)))
            self._made.setdefault(number, made)
            return (*made, "forward")
        number = node._sequence_nr() if hasattr(node, "_sequence_nr") else -1
        return (*self._made.get(number, ("", "")), "backward")
