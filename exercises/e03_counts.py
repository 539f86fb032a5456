"""Counts. A layer of width d_model has h heads of d_model / h columns, and L tokens.

Return three numbers: its parameters, with biases; the multiplications that the scores of all heads together take,
for L queries and L keys; and the additions. (A sum of n numbers takes n - 1 additions.)
"""


def counts(L: int, d_model: int, h: int) -> tuple[int, int, int]:
    raise NotImplementedError("four projections; L^2 scores for each head; each is a sum of d_model / h products")
