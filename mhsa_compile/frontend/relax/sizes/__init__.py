"""Sizes that a graph computes: values of whole numbers known by their expressions, and the operators that read them."""
