"""``python -m parallel_ext`` is ``parallel-ext``."""

from __future__ import annotations

import sys

from parallel_ext.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
