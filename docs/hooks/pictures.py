"""The pictures of the front page, from the commands before them: `python docs/hooks/pictures.py [NAME ...]`.

On a machine that does nothing else: the table says of step times that are not valid that they are not.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent.parent
WIDTH = 104
MAX_LINES = 34


def commands() -> dict[str, str]:
    """Return the command of each picture of the front page by its name: that of the block before it."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    return {
        name: line
        for line, name in re.findall(r"```\n(ampcompare .*)\n```\n\n!\[[^\]]*\]\(images/(\w+)\.svg\)", text)
    }


def draw(name: str, command: str, folder: Path) -> None:
    """Run a command in a folder and write what it prints, as a terminal shows it."""
    words = [sys.executable, "-m", *shlex.split(command)]
    environment = {**os.environ, "COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, encoding="utf-8", check=True
    )
    lines = done.stdout.splitlines()
    shown = lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], "..."]
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", style="bold"))
    console.print(Text.from_ansi("\n".join(shown)))
    picture = console.export_svg(title="", unique_id=name, code_format=PICTURE)
    (ROOT / "docs" / "images" / f"{name}.svg").write_text(picture, encoding="utf-8")


# As rich's own, without the fonts that it would fetch from another host.
PICTURE = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        shutil.copy(ROOT / "examples" / "apex_digits" / "train.py", place)
        for picture, line in commands().items():
            if not sys.argv[1:] or picture in sys.argv[1:]:
                draw(picture, line, Path(place))
