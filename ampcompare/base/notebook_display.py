"""Results that a notebook shows: as text, and as HTML where the packages for it are installed.

IPython calls these methods by their names; neither it nor anything that draws is imported before.
"""

from collections.abc import Collection
from importlib import import_module
from typing import ClassVar


class ShownInNotebook:
    """Shows itself in a notebook.

    A subclass names, as `module:function`, what makes a pair of itself: text, and HTML or None. It is named because
    results are on a lower floor than what draws them.
    """

    _view: ClassVar[str]

    def _repr_html_(self) -> str | None:
        """Return HTML that needs no script and no file; None without jinja2."""
        return self._text_and_html()[1]

    def _repr_mimebundle_(self, **selection: Collection[str]) -> dict[str, str]:
        """Return text and HTML by their media types, from which IPython selects."""
        text, html = self._text_and_html()
        return {"text/plain": text} if html is None else {"text/plain": text, "text/html": html}

    def _text_and_html(self) -> tuple[str, str | None]:
        module, _, function = self._view.partition(":")
        text, html = getattr(import_module(module), function)(self)
        return text, html
