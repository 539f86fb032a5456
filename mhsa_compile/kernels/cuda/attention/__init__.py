"""Attention of many queries on tensor cores (as FlashAttention-2) and, in float32, on CUDA cores."""
