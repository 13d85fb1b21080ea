"""What `scripts/gpu-check` runs on a GPU, part by part, and rehearses on a CPU."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The programs next to this package import each other by their file names.
sys.path[:0] = [folder for folder in (str(ROOT), str(ROOT / "benchmarks")) if folder not in sys.path]
