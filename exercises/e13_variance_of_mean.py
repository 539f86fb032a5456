"""A text says: the mean of h heads has the variance sigma^2 / h. That is so for independent heads; they share x.

Given the variance sigma^2 of each of h numbers, and the correlation r of any two of them, return the variance of
their mean.
"""


def variance_of_mean(variance: float, r: float, h: int) -> float:
    raise NotImplementedError("h variances and h (h - 1) covariances r sigma^2, divided by h^2")
