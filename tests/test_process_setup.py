"""Each place that changes its own process, or gives variables to a child, stands in docs/design.md, with the reason."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TORCH = "set_num_threads set_num_interop_threads set_flush_denormal set_default_dtype use_deterministic_algorithms"
CALLS = {
    **dict.fromkeys(TORCH.split(), "torch"),
    **dict.fromkeys(("chdir", "setsid", "putenv", "umask", "nice"), "os"),
    **dict.fromkeys(("update", "setdefault", "clear"), "os.environ"),
    **dict.fromkeys(("insert", "append", "remove", "extend"), "sys.path"),
    "pop": ("os.environ", "sys.path"),
    "set_tf32": "",
    "set_device": ("torch.cuda", "torch.xpu"),
    "sched_setaffinity": "os",
    "_set_mkldnn_enabled": "torch._C",
    "signal": "signal",
    "pthread_sigmask": "signal",
    "enable": "faulthandler",
    "register": "faulthandler",
    "setrlimit": ("resource", "limits"),
    "prctl": "ctypes.CDLL(None)",
    "addaudithook": "sys",
    "set_start_method": "multiprocessing",
}
"""Functions by name, with what they are functions of; "" for one that is imported by its name."""
STARTS = frozenset({"start_fork", "ProcessServer", "run_command_with_time_limit"})
"""Calls that start a process with variables of its own, next to those with `env`."""
TARGETS = re.compile(
    r"os\.environ\[.*|sys\.(path|argv|dont_write_bytecode)(\[.*)?"
    r"|torch\.backends\.(cudnn\.(benchmark|deterministic|allow_tf32)|cuda\.matmul\.\w+)"
)
WORDS = re.compile(
    r"torch\.(set_|use_det|backends)|set_tf32|set_device|sched_setaffinity|_set_mkldnn|environ|sys\.(path|argv|dont)|signal|faulthandler|rlimit|prctl"
    r"|os\.(chdir|setsid|putenv|umask|nice)|addaudithook|set_start_method"
    rf"|\benv=|\b(?:{'|'.join(STARTS)})\("
)
"""What a file has in it that is worth parsing: most have none of it."""
NAMES = re.compile(r"((?:`[\w.]+`(?:, | and )?)+) \(`([\w/.]+\.py)`")  # `a`, `b` and `c` (`path`)


def changes_of_process(text: str) -> Iterator[str]:
    """Yield the outermost function or the method around each statement that changes the process, "" for the module.

    A call that gives variables to a child counts as well.
    """

    def visit(node: ast.AST, around: str) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            name = around
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                is_method = isinstance(node, ast.ClassDef) and isinstance(child, ast.FunctionDef)
                name = f"{around}.{child.name}" if is_method else around or child.name
            if isinstance(child, ast.Assign | ast.Delete):
                targets = [
                    one
                    for each in child.targets
                    for one in (each.elts if isinstance(each, ast.Tuple) else [each])
                ]
                if any(TARGETS.fullmatch(ast.unparse(one)) for one in targets):
                    yield name
            elif isinstance(child, ast.Call) and (_is_change(child.func) or _gives_variables(child)):
                yield name
            yield from visit(child, name)

    yield from visit(ast.parse(text), "")


def _is_change(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return CALLS.get(function.id) == ""
    if not isinstance(function, ast.Attribute) or function.attr not in CALLS:
        return False
    owner = CALLS[function.attr]
    return ast.unparse(function.value) in ((owner,) if isinstance(owner, str) else owner)


def _gives_variables(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in STARTS or any(keyword.arg == "env" for keyword in call.keywords)


def test_each_change_of_a_process_is_in_the_table() -> None:
    """A reader who asks how a process is set up finds all of it in one place."""
    section = (ROOT / "docs/design.md").read_text(encoding="utf-8").partition("## Words")[0]
    said = {
        (path, name) for names, path in NAMES.findall(section) for name in re.findall(r"`([\w.]+)`", names)
    }
    said |= {(path, "") for path in re.findall(r"^\| `([\w/.]+\.py)` \|", section, re.MULTILINE)}
    package = ROOT / "ampcompare"
    texts = {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8")
        for path in package.rglob("*.py")
    }
    found = {
        (path, name)
        for path, text in texts.items()
        if WORDS.search(text)
        for name in changes_of_process(text)
    }
    assert ("training/process/switches.py", "configure_process") in found, "the test sees what it looks for"
    assert ("base/processes/call.py", "call_in_child") in found
    assert not found - said, "neither of the tables of docs/design.md has these"


@pytest.mark.parametrize(
    "line",
    [
        "torch.set_num_threads(1)",
        "os.environ['A'] = 'b'",
        "os.environ.setdefault('A', 'b')",
        "sys.path.insert(0, '.')",
        "sys.path[:] = []",
        "del sys.path[0]",
        "module, sys.argv = 1, []",
        "signal.signal(signal.SIGINT, handler)",
        "torch.backends.cudnn.benchmark = True",
        "torch.cuda.set_device(device)",
        "os.sched_setaffinity(0, cores)",
        "subprocess.run(words, env={})",
        "server.start_fork(function, words, **options)",
    ],
)
def test_what_counts_as_a_change(line: str) -> None:
    """A line of this kind in a method is found, under the name of the class and the method."""
    assert list(changes_of_process(f"class A:\n    def b(self):\n        {line}\n")) == ["A.b"]
