"""What is right is w^T C w, of the covariances C and the weights w = 1 / h."""

import numpy as np


def variance_of_mean(variance, r, h):
    return variance * (r + (1 - r) / h)


def cases():
    return [(4.0, 0.0, 8), (4.0, 0.25, 8), (2.0, 1.0, 12)]


def expected(variance, r, h):
    covariance = variance * (r * np.ones((h, h)) + (1 - r) * np.eye(h))
    weights = np.full(h, 1 / h)
    return weights @ covariance @ weights


MISTAKES = {
    "sigma^2 / h whatever r is: equal heads, r = 1, would gain nothing": lambda variance, r, h: variance / h,
    "sigma^2 / sqrt(h): that is for deviations, sigma / sqrt(h)": lambda variance, r, h: variance / np.sqrt(h),
    "sigma^2 whatever h is: independent heads do gain": lambda variance, r, h: variance,
    "the variance of the sum: divide by h^2": lambda variance, r, h: variance * h * (1 + (h - 1) * r),
    "the covariances are counted h^2 times: there are h (h - 1) pairs": lambda variance, r, h: variance * (1 / h + r),
    "pairs are counted once: the square of a sum has each of them twice": lambda variance, r, h: (
        variance / h + variance * r * (h - 1) / (2 * h)
    ),
}
