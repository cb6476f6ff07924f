"""Build the pages of the public names from their docstrings: python docs/build_api.py DIRECTORY.

It fails when pdoc warns of anything, after the pages are written.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pdoc

MODULES = [
    "parallel_ext",
    "parallel_ext.models.cogagent",
    "parallel_ext.lora",
    "parallel_ext.lora.swiss_army",
]
"""What pdoc is given; ``parallel_ext`` brings ``parallel_ext.nn`` and ``parallel_ext.ops``."""


def build(directory: Path) -> list[str]:
    """Write the pages into ``directory`` and return what pdoc warned of."""
    directory = directory.resolve()
    os.chdir(Path(__file__).parent)  # beside the folder of the sources pdoc warns of two packages
    pdoc.render.configure(docformat="google", show_source=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.pdoc(*MODULES, output_directory=directory)
    others = (DeprecationWarning, FutureWarning)  # of packages that are imported meanwhile
    return [str(each.message) for each in caught if not issubclass(each.category, others)]


if __name__ == "__main__":
    sys.exit("\n".join(build(Path(sys.argv[1]))) or None)
