"""Run the command line: `python -m ampcompare`, also under torchrun and from a checkout that is not installed."""

import sys

from ampcompare.cli import main

if __name__ == "__main__":
    sys.exit(main())
