"""`ampcompare list`: what there is to choose from."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command("list")
@click.argument("what", type=click.Choice(["arms", "models", "data", "all"]), default="all")
def command(what: str) -> int:
    """Show arms, models and data sets, available or why not."""
    from tabulate import tabulate

    for name, rows in _sections():
        if what in (name, "all"):
            shown = [[item, "yes" if available else "no", reason] for item, available, reason in rows]
            click.echo(tabulate(shown, headers=[name, "available", "what it is, or why not"], tablefmt="simple") + "\n")
    return 0


def _sections() -> list[tuple[str, list[tuple[str, bool, str]]]]:
    from ampcompare.arm import BACKENDS, third_party_backends
    from ampcompare.environment import probe_apex
    from ampcompare.tasks.catalog import list_data, list_models

    arms = [(name, True, spec.summary) for name, spec in BACKENDS.items()]
    apex = probe_apex()
    arms.append(("apex:...,engine=compat", True, "this package's own engine, on any device"))
    arms.append(("apex:...,engine=nvidia", apex.has_amp, apex.reason))
    arms.extend((name, True, f"from another package: {value}") for name, value in third_party_backends().items())
    return [("arms", arms), ("models", list_models()), ("data", list_data())]
