"""Attention on matrix tiles: scores of 32 keys by 32 queries at a time, queries along the lanes."""
