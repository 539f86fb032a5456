"""An order in which what is alike stands together."""

from __future__ import annotations

import numpy as np


def linkage_order(apart: np.ndarray) -> tuple[int, ...]:
    """The leaves of the tree that average linkage makes of distances (n, n), symmetric.

    The two nearest clusters become one, again and again; of the four ways to lay them end to end it takes the one whose
    neighbours are nearest. Source: Sokal and Michener, "A statistical method for evaluating systematic relationships"
    (1958), UPGMA.

    >>> linkage_order(np.abs(np.subtract.outer([0, 9, 1, 8], [0, 9, 1, 8])))
    (0, 2, 3, 1)
    """
    clusters: list[tuple[int, ...]] = [(i,) for i in range(len(apart))]
    while len(clusters) > 1:
        means = np.array([[apart[np.ix_(a, b)].mean() for b in clusters] for a in clusters])
        np.fill_diagonal(means, np.inf)
        i, j = sorted(divmod(int(means.argmin()), len(clusters)))
        a, b = clusters[i], clusters.pop(j)
        ways = [(left, right) for left in (a, a[::-1]) for right in (b, b[::-1])]
        left, right = min(ways, key=lambda way: apart[way[0][-1], way[1][0]])
        clusters[i] = left + right
    return clusters[0]
