"""Pass metrics that a script logs to whatever records it."""

from collections.abc import Callable

Listener = Callable[[str, float, str], None]

_listeners: list[Listener] = []


def log_metric(name: str, value: float, *, source: str = "ampcompare.log_metric") -> None:
    """Record a metric of the running script, such as "top1"; without a record, nothing happens.

    Args:
        name: of the metric, as `--metric` names it.
        value: a number, or a tensor of one element.
        source: the function that the script called.
    """
    for listener in _listeners:
        listener(name, float(value), source)


def listen_to_metrics(listener: Listener) -> Callable[[], None]:
    """Pass name, value and source of each metric from now on to `listener`; return a function that ends it."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)
