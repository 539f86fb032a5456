"""Ops and a target -> an artifact. Imports `frontend`, `kernels`, `records`, `runtime` and what is below them."""
