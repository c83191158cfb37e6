"""``python -m cfp.operators`` checks and times all implementations."""

import sys

from cfp.operators.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
