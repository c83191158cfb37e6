"""Writes the pages of docs/results: ``python -m cfp_test.results``.

With ``--check`` nothing is written, and the exit status is 1 if a page would change.
"""

import argparse
import sys
from pathlib import Path

from cfp_test.results.pages import RESULTS
from cfp_test.results.registry import PAGES


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the pages' folder")
    options = parser.parse_args()
    changed = []
    for page in PAGES:
        file, text = options.out / f"{page.name}.md", page.text()
        if not file.exists() or file.read_text() != text:
            changed.append(page.name)
            if not options.check:
                file.write_text(text)
    print("\n".join(changed) or "no page differs")
    return int(options.check and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
