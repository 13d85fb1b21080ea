"""The command line. Its first page and its version need neither click nor any command: both answer at once."""

import sys

from ampcompare.base.version import __version__
from ampcompare.cli.output import discard_buffered_output, replace_closed_standard_streams

COMMANDS = {
    "run": "Train one arm and print its row.",
    "compare": "Train a matrix of arms and seeds and print them side by side.",
    "judge": "Compare results that were measured elsewhere.",
    "floor": "Find how far a script's losses move by roundings alone.",
    "replay": "Judge by fp64 whether one step is the same after a change.",
    "report": "Render the records of a run directory again.",
    "export": "Export the runs of a run directory to TensorBoard, W&B or MLflow.",
    "convert": "Convert a checkpoint between Apex and torch.amp, or inspect it.",
    "migrate": "Move Apex scripts to torch.amp; verify that they train the same.",
    "exec": "Run an unmodified Apex script on ampcompare.apex.",
    "shim": "Make `from apex import amp` work in this environment, or undo that.",
    "lint": "Report mistakes in the use of Apex and torch.amp in source files.",
    "lsp": "Report mistakes and offer fixes and rewriting in an editor.",
    "doctor": "Check this machine and its libraries; report problems and fixes.",
    "diagnose": "Find where numbers overflow or are lost, and what to keep in fp32.",
    "profile": "Find why an arm is faster or not, smaller or not.",
    "find-batch": "Find the largest batch that each arm fits.",
    "explain": "Explain a precision setting: dtypes, casts, torch.amp equivalent.",
    "list": "List arms, tasks, models, data, optimizers, runs and more.",
    "config": "Show where each setting came from; print the schema of files.",
}
SECTIONS = {
    "Choose and migrate": ("explain", "migrate", "lint", "convert", "exec", "shim", "lsp"),
    "Compare": (
        "compare",
        "run",
        "find-batch",
        "diagnose",
        "profile",
        "report",
        "export",
        "judge",
        "floor",
        "replay",
    ),
    "Look up": ("doctor", "list", "config"),
}
SUMMARY = "Compare Apex O0-O3, torch.amp and manual .half() on the same weights and batches."
EXAMPLES = """\
  What does O2 do, and what replaces it?
    ampcompare explain O2
  Does accuracy hold, and what does each arm cost?
    ampcompare compare --arm fp32,O2,bf16
  What can this machine run?
    ampcompare doctor
"""
EPILOG = """\
Exit codes: 0 done; 1 a --fail-on threshold was exceeded; 2 usage or a bad
input file; 3 the arm failed (run), or no arm finished or one failed under
--strict (compare); 4 the environment cannot do it; 64 usage of judge --against,
where lower codes are answers; 70 an internal error, whose details are in a
file; 130 interrupted; 143 ended by SIGTERM or SIGHUP, with a checkpoint. Every
option can be set by an environment variable such as AMPCOMPARE_RUN_EPOCHS.
"""


def help_overview_text() -> str:
    """Return the first page of help: what each command is for."""
    lines = ["Usage: ampcompare COMMAND [OPTIONS]", "", SUMMARY]
    for title, names in SECTIONS.items():
        lines += ["", f"{title}:", *(f"  {name:<11}{COMMANDS[name]}" for name in names)]
    lines += [
        "",
        "Options:",
        "  -h, --help     this page; COMMAND -h: its common options; COMMAND --help: all",
    ]
    lines += ["  -V, --version  the version", "", "Examples:", f"{EXAMPLES}", EPILOG]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; errors meant for users are one line on stderr."""
    replace_closed_standard_streams()
    words = sys.argv[1:] if arguments is None else arguments
    if words in (["-h"], ["--help"]):
        return _write_output_and_exit_code(help_overview_text())
    if words in (["-V"], ["--version"]):
        return _write_output_and_exit_code(f"ampcompare, version {__version__}\n")
    from ampcompare.cli.group import run_command_line

    return run_command_line(arguments)


def _write_output_and_exit_code(text: str) -> int:
    """Write to stdout and return the exit code; a reader that has seen enough, such as `head`, is not a failure."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard_buffered_output()
    except OSError as error:
        discard_buffered_output()
        sys.stderr.write(f"ampcompare: cannot write the output: {error.strerror or error}\n")
        return 4
    return 0
