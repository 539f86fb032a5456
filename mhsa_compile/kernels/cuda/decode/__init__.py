"""Attention of few queries: keys shared out to blocks (split-KV), then joined. Imports `attention`."""
