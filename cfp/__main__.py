"""``python -m cfp`` is the ``cfp`` command."""

from cfp.cli import main

if __name__ == "__main__":
    main()
