"""Functions that take the parameters of an options class, and the text that its docstring has for each.

An option is written once, as a parameter of the class: name, type, default, and a line below `Args:`. Python's function
gets all of it by `takes_parameters_of`, the command line by `ampcompare.cli.help.make_option_from_signature`.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_type_hints

Options = TypeVar("Options")
P = ParamSpec("P")
Result = TypeVar("Result")

SECTION = re.compile(r"^(Args|Attributes):\n((?:[ ].*\n?|\n(?=[ ]))*)", flags=re.MULTILINE)


def takes_parameters_of(
    options: Callable[P, Options],
) -> Callable[[Callable[[Options], Result]], Callable[P, Result]]:
    """Return a decorator: a function of options becomes one of their parameters, with signature and docstring.

    Args:
        options: a class whose constructor has the parameters, and whose docstring describes them below `Args:`.
    """

    def with_parameters(function: Callable[[Options], Result]) -> Callable[P, Result]:
        signature = inspect.signature(options)

        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:  # that of the constructor would name the class
                raise TypeError(f"{function.__name__}(): {error}") from None
            return function(options(*args, **kwargs))

        made: Any = call
        for name in ("__module__", "__name__", "__qualname__"):
            setattr(made, name, getattr(function, name))
        constructor: Any = options.__init__  # of a class, which P does not say
        made.__wrapped__ = constructor  # in whose module the names of the types are known
        returns = function.__annotations__["return"]
        made.__annotations__ = {**constructor.__annotations__, "return": get_type_hints(function)["return"]}
        made.__signature__ = signature.replace(return_annotation=returns)
        arguments = SECTION.search(inspect.getdoc(options) or "")
        head, gap, rest = (inspect.getdoc(function) or "").partition("\n\n")
        made.__doc__ = f"{head}{gap}{arguments[0].strip()}\n\n{rest}" if arguments else function.__doc__
        return call

    return with_parameters


def parameter_docs_of(source: Callable[..., Any]) -> dict[str, str]:
    """Return what the docstring of a function or class says of each parameter, in one line without its period."""
    texts: dict[str, str] = {}
    for _, section in SECTION.findall((inspect.getdoc(source) or "") + "\n"):
        for entry in re.split(r"\n(?=    \S)", section.rstrip()):
            names, _, text = " ".join(entry.split()).partition(": ")
            texts |= {name: text.removesuffix(".") for name in names.split(", ") if name not in texts}
    return texts
