"""Attention of few queries over many keys, which threads share (split-KV). Imports `simd` and `attention`."""
