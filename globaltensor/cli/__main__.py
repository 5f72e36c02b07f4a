"""`python -m globaltensor.cli` is the command `globaltensor`."""
import sys

from globaltensor.cli import main

if __name__ == "__main__":
    sys.exit(main())
