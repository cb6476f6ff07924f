"""Functions of other packages on a parallel model: exact, or refused by name.

One module for each kind of function. All are extended in place by the first ``px.parallelize``
(:mod:`parallel_ext.parallel.extending`), and do to everything else what they did before.
"""

from parallel_ext.interplay.serve import serve, withdraw

__all__ = ["serve", "withdraw"]
