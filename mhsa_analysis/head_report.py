"""What statistics of heads show: how alike heads are, what each looks at, and what y would lose without it.

Notation: D embed, H heads, F value head dim; C_i = heads[i] W_O^(i), what head i adds to y = sum of C_i + b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mhsa_analysis.attention_rows import RowSums
from mhsa_analysis.heads_page import ShownLayer, heads_page, in_frame
from mhsa_analysis.layer_weights import LayerWeights
from mhsa_analysis.moments import HeadMoments, Moments, ShuffledMoments, blocks_of, information, whitener
from mhsa_analysis.output_fit import SplitMoments
from mhsa_analysis.pruning import PruningPlan, plan_for, plan_of
from mhsa_compile.spec.attention_spec import AttentionSpec

_HALF = 0.5  # of a head's attention on one place makes that its role
_BROAD = 0.9  # of the largest entropy there is


@dataclass(frozen=True, eq=False, repr=False)
class HeadReport:
    """Arrays (H, H) compare heads, arrays (H,) describe them. All are means over the valid tokens.

    rho             cosine of the heads' outputs, as the textbook has it. It depends on each head's arbitrary basis:
                    with W_V R and R^T W_O for W_V and W_O, R orthogonal, y is the same and rho is not
    cka             linear centred kernel alignment of the heads' outputs, 0 to 1, whatever their bases. Source:
                    Kornblith et al., "Similarity of neural network representations revisited" (2019)
    contribution    cosine of C_i and C_j around their means: 1 adds the same to y, -1 takes it away, 0 is orthogonal
    js              Jensen-Shannon distance of the attention rows, 0 to 1
    information     mutual information of the heads' outputs in nats, as of Gaussians, less what chance shows: the
                    second-order part alone; see `gaussian_information`. Infinite on the diagonal
    entropy         of the attention rows, in nats
    entropy_share   the same by its maximum, ln of the number of keys with a weight: 0 one key, 1 all alike
    distance        mean distance of the keys that are looked at, in tokens; None in cross-attention
    shares          place -> (H,): how much of the attention goes there, of queries that have that place
    roles           the place with half of the attention or more; else "broad", with an entropy_share of 0.9 or more;
                    else "mixed". Positional and separator heads: Voita et al., "Analyzing multi-head self-attention"
                    (2019); Clark et al., "What does BERT look at?" (2019)

    >>> import mhsa_compile as mhsa, torch
    >>> spec = mhsa.AttentionSpec(embed_dim=16, num_heads=4, outputs=("y", "heads", "weights"))
    >>> layer, x = mhsa.MultiHeadAttention(spec), torch.randn(3, 20, 16)
    >>> report = mhsa.analysis.HeadStatistics(layer).add(x, layer(x)).report()
    >>> report.dissimilarity.shape, len(report.roles), len(report.pruning_curve())
    ((4, 4), 4, 3)
    """

    spec: AttentionSpec
    tokens: int
    rho: np.ndarray
    cka: np.ndarray
    contribution: np.ndarray
    js: np.ndarray
    information: np.ndarray
    entropy: np.ndarray
    entropy_share: np.ndarray
    distance: np.ndarray | None
    shares: Mapping[str, np.ndarray]
    roles: tuple[str, ...]
    split: SplitMoments = field(repr=False)

    @property
    def dissimilarity(self) -> np.ndarray:
        """(H, H), 0 to 1: the larger of 1 - cka and js. 0 is a twin: looks where the other looks, and says the same up
        to its basis."""
        apart: np.ndarray = np.maximum(1.0 - self.cka, self.js)
        return apart

    @property
    def order(self) -> tuple[int, ...]:
        """The heads so that those alike stand together: average linkage of `dissimilarity`."""
        return linkage_order(self.dissimilarity)

    def twins(self, within: float = 0.1) -> list[tuple[int, int, float]]:
        """Pairs of heads that are at most `within` apart, the nearest first: (i, j, dissimilarity)."""
        apart = self.dissimilarity
        pairs = zip(*np.triu_indices(len(apart), 1), strict=True)
        twins = [(int(i), int(j), float(apart[i, j])) for i, j in pairs if apart[i, j] <= within]
        return sorted(twins, key=lambda pair: pair[2])

    def prune(self, k: int) -> PruningPlan:
        """The k heads that y loses least without; of grouped heads whole groups.

        Without the set P, and with the means of its heads in the bias, y is off by exactly 1_P^T G 1_P in the mean
        square, G the covariance of the C_i: the best set for H <= 16, greedily else. Chosen on three of four sequences;
        the plan says what it costs on them and on the fourth. To remove heads: Michel et al.,
        "Are sixteen heads really better than one?" (2019); Voita et al. (2019). Raises InputError.
        """
        return plan_for(self.split, k)

    def without(self, heads: Sequence[int]) -> PruningPlan:
        """The plan that removes these heads. Raises InputError: heads that do not exist, all of them."""
        return plan_of(self.split, heads)

    def pruning_curve(self) -> list[PruningPlan]:
        """The best plan for every number of heads that can go, but all."""
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        return [self.prune(k) for k in range(group, spec.num_heads, group)]

    def _repr_html_(self) -> str:
        """Shows the page of `mhsa heads` in a notebook, without attention maps, which nobody kept."""
        return in_frame(heads_page("What the heads do", [ShownLayer("layer", self)]))

    def __repr__(self) -> str:
        lines = [f"HeadReport of {self.spec.num_heads} heads, {self.tokens} tokens"]
        lines.append("head  role       entropy  of max  distance  nearest")
        apart = self.dissimilarity + 2 * np.eye(len(self.roles))
        for head, role in enumerate(self.roles):
            near = int(apart[head].argmin())
            distance = "" if self.distance is None else f"{self.distance[head]:.2f}"
            lines.append(
                f"{head:>4}  {role:<9}  {self.entropy[head]:>7.2f}  {self.entropy_share[head]:>6.0%}  {distance:>8}"
                + (f"  {near} ({apart[head, near]:.2f})" if len(self.roles) > 1 else "")
            )
        return "\n".join(lines)


def report_of(layer: LayerWeights, moments: ShuffledMoments, parts: Sequence[Moments], rows: RowSums) -> HeadReport:
    spec, H = layer.spec, layer.spec.num_heads
    heads = HeadMoments.of(layer, moments)
    distance = None if spec.is_cross else rows.distance / max(rows.rows, 1)
    shares = {place: on / rows.queries[place] for place, on in rows.on.items() if rows.queries[place]}
    share = rows.share / max(rows.choices, 1)
    return HeadReport(
        spec=spec,
        tokens=moments.count,
        rho=_cosine(np.einsum("ijkk->ij", blocks_of(moments.second, H))),
        cka=_cosine((blocks_of(moments.covariance, H) ** 2).sum(axis=(2, 3))),
        contribution=_cosine(heads.cost),
        js=rows.apart / max(rows.rows, 1),
        information=_information(moments, H),
        entropy=rows.entropy / max(rows.rows, 1),
        entropy_share=share,
        distance=distance,
        shares=shares,
        roles=tuple(_role(head, shares, share) for head in range(H)),
        split=SplitMoments.of(layer, parts),
    )


def _cosine(products: np.ndarray) -> np.ndarray:
    """Inner products (H, H) by the lengths of both; 0 for a head of no length."""
    length = np.sqrt(np.maximum(np.diagonal(products), 0.0))
    by = np.outer(length, length)
    return np.clip(products / np.where(by > 0, by, np.inf), -1.0, 1.0)


def _information(moments: ShuffledMoments, H: int) -> np.ndarray:
    covariance, shuffled = blocks_of(moments.covariance, H), blocks_of(moments.shuffled / moments.count, H)
    whiteners = [whitener(covariance[i, i]) for i in range(H)]
    information_of_pairs = np.full((H, H), np.inf)
    for i in range(H):
        for j in range(i):
            pair = whiteners[i], whiteners[j]
            chance = (information(shuffled[i, j], *pair) + information(shuffled[j, i].T, *pair)) / 2
            information_of_pairs[i, j] = information_of_pairs[j, i] = max(
                information(covariance[i, j], *pair) - chance, 0.0
            )
    return information_of_pairs


def _role(head: int, shares: Mapping[str, np.ndarray], entropy_share: np.ndarray) -> str:
    place = max(shares, key=lambda name: shares[name][head], default=None)
    if place is not None and shares[place][head] >= _HALF:
        return place
    return "broad" if entropy_share[head] >= _BROAD else "mixed"


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
