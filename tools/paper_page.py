#!/usr/bin/env python3
"""Writes docs/paper.md, the paper's numbers beside our predictions.

tools/paper_page.py            write it
tools/paper_page.py --check    fail if it would change
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_bp.planning.paper import page

TARGET = Path(__file__).resolve().parents[1] / "docs" / "paper.md"


def main(argv: list[str]) -> int:
    """Write or check."""
    if argv not in ([], ["--check"]):
        print(__doc__)
        return 2
    text = page()
    if argv:
        same = TARGET.is_file() and TARGET.read_text() == text
        print(
            "docs/paper.md is up to date" if same else "docs/paper.md would change; write it again"
        )
        return 0 if same else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
