"""Parameters are counted on a layer, multiplications by its spec; additions are those but for one a score."""

import mhsa_compile as mhsa


def counts(L, d_model, h):
    return 4 * d_model**2 + 4 * d_model, L**2 * d_model, L**2 * (d_model - h)


def cases():
    return [(10, 96, 8), (7, 96, 12)]


def expected(L, d_model, h):
    layer = mhsa.MultiHeadAttention(mhsa.AttentionSpec(embed_dim=d_model, num_heads=h))
    products = layer.spec.attention_flops(B=1, L=L, S=L) // 4  # of scores and values, a sum for each product
    return sum(p.numel() for p in layer.parameters()), products, products - h * L**2


def _with(place, number):
    """The solution with another number at a place."""

    def mistake(L, d_model, h):
        results = list(counts(L, d_model, h))
        results[place] = number(L, d_model, h)
        return tuple(results)

    return mistake


MISTAKES = {
    "parameters: the biases are missing, d_model for each of four projections": _with(0, lambda L, D, h: 4 * D**2),
    "parameters: three projections, W_O is missing": _with(0, lambda L, D, h: 3 * D**2 + 3 * D),
    "parameters: heads divide d_model among them, they do not have it each": _with(
        0, lambda L, D, h: 4 * h * D**2 + 4 * D
    ),
    "multiplications: of one head; there are h": _with(1, lambda L, D, h: L**2 * D // h),
    "multiplications: heads have d_model / h columns, not d_model": _with(1, lambda L, D, h: L**2 * D * h),
    "multiplications: L^2 scores, not L": _with(1, lambda L, D, h: L * D),
    "additions: as many as multiplications; a sum of n takes n - 1": _with(2, lambda L, D, h: L**2 * D),
    "additions: one less for all heads together; each head saves one a score": _with(2, lambda L, D, h: L**2 * (D - 1)),
}
