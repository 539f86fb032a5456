"""Operators that ONNX has as a preview, in a domain of their own: they are understood by their definition."""

from __future__ import annotations

DOMAIN = "ai.onnx.preview"
DEFINED = ("FlexAttention",)
VERSION = 1
"""The version of the domain whose definitions are read."""
