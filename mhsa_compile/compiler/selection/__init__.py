"""Which kernel computes an op, with which config."""
