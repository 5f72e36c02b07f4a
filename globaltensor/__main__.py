"""`python -m globaltensor`: the command, by the interpreter that one chooses."""
from __future__ import annotations

import sys

from globaltensor_command import main

if __name__ == "__main__":
    sys.exit(main())
