"""`python -m kd`: the command `kd`."""

import sys

from kd.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
