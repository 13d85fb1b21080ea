"""What stands for the objects of a file that is read without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ampcompare.base.errors import AmpCompareError, ConversionError
from ampcompare.base.formatting import printable_line

DATA_ONLY = frozenset(
    {
        "argparse.Namespace",
        "optparse.Values",
        "types.SimpleNamespace",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib.PurePosixPath",
        "pathlib.PureWindowsPath",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
        "datetime.datetime",
        "datetime.date",
        "datetime.time",
        "datetime.timedelta",
        "datetime.timezone",
        "decimal.Decimal",
        "fractions.Fraction",
    }
)


def is_class_of_plain_data(name: str) -> bool:
    """Return whether a class only holds values: some of the standard library, and the loss scalers of any program.

    Their values are carried, the class is not.
    """
    return name in DATA_ONLY or name.rpartition(".")[2].endswith("LossScaler")


MAX_NAME = 120
MAX_FAULT = 120


class NotPickled(ValueError):
    """The bytes are not a pickle that a checkpoint may be; the message completes "the file cannot be read: ..."."""


class PlaceholderMetaclass(type):
    """Class of the classes that stand for what a file names, a class or a function: nothing is imported.

    `builder` makes plain data or a tensor of the arguments of a call; without one a call is noted in `calls`.
    """

    name: str
    builder: Callable[..., Any] | None
    calls: dict[str, None]

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:  # not the constructor of `type`
        return cls.__new__(cls, *arguments, **keywords)  # type: ignore[arg-type]


class OpaqueObject(metaclass=PlaceholderMetaclass):
    """An object that only calling `name` would make, and what pickle gives it."""

    name = "object"
    builder = None
    calls: dict[str, None] = {}  # noqa: RUF012  # each class that a file names has that of the file
    arguments: tuple[Any, ...]  # what it would be called with
    state: Any  # what it would be given after; None where nothing
    value: Any  # array or plain value that was built from it
    receive: Callable[[OpaqueObject, Any], None] | None  # takes the state of what can be built

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        if cls.builder is not None and not keywords:
            return cls.builder(*arguments)
        if not is_class_of_plain_data(cls.name):
            cls.calls[cls.name] = None
        return cls.make_without_noting_call(cls.name, arguments)

    @classmethod
    def make_without_noting_call(cls, name: str, arguments: tuple[Any, ...]) -> OpaqueObject:
        """Return the placeholder of an object that a call would make; the call is not noted."""
        made: OpaqueObject = object.__new__(cls)
        made.name, made.arguments = name, arguments
        made.state = made.value = made.receive = None
        return made

    def __repr__(self) -> str:  # without its arguments, which may hold one another many times
        return f"<{self.name}>"

    def __setstate__(self, state: Any) -> None:
        if self.receive is not None:
            self.receive(self, state)
        else:
            self.state = state

    def append(self, *values: Any) -> None:
        """Drop what fills a subclass of dict, list or set."""

    __setitem__ = extend = add = append


@contextmanager
def translate_entry_errors(*path: object) -> Iterator[None]:
    """Turn what code raises on an entry of another shape into a ConversionError that names the entry by its keys.

    A file can hold anything under the keys that are read here, and to check each value before its use would double the
    code that uses it.
    """
    try:
        yield
    except AmpCompareError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        name = printable_line(".".join(map(str, path)), MAX_NAME) or "(all)"
        raise ConversionError(f"its entry {name} is damaged: {fault_text_of_exception(error)}") from None


def fault_text_of_exception(error: Exception) -> str:
    """Return what an exception says about the data, as one line: a KeyError alone is only the name of the key."""
    if isinstance(error, KeyError) and error.args:
        return f"it has no {printable_line(repr(error.args[0]), MAX_NAME)}"
    return printable_line(str(error), MAX_FAULT) or type(error).__name__
