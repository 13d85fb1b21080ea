"""A module in a separate process: what it can import."""

import json
import os
import subprocess
from pathlib import Path

import ampcompare
from ampcompare.base.processes.start import module_command

PROBE = """
import json, sys
from importlib.util import find_spec

print(json.dumps([find_spec("ampcompare") is not None, sys.path]))
"""


def test_the_rooms_of_the_package_are_no_modules_of_a_script(tmp_path: Path) -> None:
    """Of a checkout, the folder is found in which the package lies, not its own: `import apex` would find one there."""
    (tmp_path / "probe.py").write_text(PROBE)
    (package,) = ampcompare.__path__
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    output = subprocess.run(module_command("probe"), env=environment, capture_output=True, check=True).stdout
    is_found, path = json.loads(output)
    assert is_found
    assert package not in map(os.path.abspath, path)
