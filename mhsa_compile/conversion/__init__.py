"""Attention layers of PyTorch and of transformers as MultiHeadAttention, held against what they compute themselves."""
