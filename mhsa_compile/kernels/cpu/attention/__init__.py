"""Attention of many queries: tiles of queries and keys, with an online softmax. Imports `simd`."""
