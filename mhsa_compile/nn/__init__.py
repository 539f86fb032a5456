"""Attention in PyTorch: the modules, their eager meaning, and the operator mhsa.Attention. Imports `spec`; no TVM."""
