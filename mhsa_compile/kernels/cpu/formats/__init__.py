"""Formats of stored numbers, one class each: how a row is rounded and scaled, how it is widened again."""
