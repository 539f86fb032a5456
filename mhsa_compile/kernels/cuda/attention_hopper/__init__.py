"""Warp-specialised attention by wgmma and TMA (as FlashAttention-3). Imports `attention`."""
