"""Attention layers of PyTorch and of transformers as MultiHeadAttention, each held against what the layer itself computes."""
