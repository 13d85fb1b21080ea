"""`ampcompare lsp`: a language server for editors."""

import click

from ampcompare.cli.help import Command, option


@click.command(
    "lsp",
    cls=Command,
    examples=[
        ("What an editor starts, and speaks with over stdin and stdout:", "ampcompare lsp"),
        ("For files that another torch is to run:", "ampcompare lsp --torch-version 2.6"),
    ],
    epilog="Exit codes: 0 the editor has ended it; 4 the extra lsp is not installed.",
)
@option(
    "--torch-version", metavar="VERSION", help="the torch that files are for; by default that installed here"
)
def command(torch_version: str | None) -> int:
    """Report mistakes and offer fixes and rewriting in an editor.

    A language server over standard input and output: what lint finds, its fixes, and the rewriting of migrate.
    """
    from ampcompare.base.environment.extras import require_lsp_packages

    require_lsp_packages()
    from ampcompare.cli.language_server import make_server

    make_server(torch_version).start_io()
    return 0
