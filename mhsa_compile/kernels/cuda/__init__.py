"""Kernels for NVIDIA's GPUs from sm_80 on. Imports `common` and `interface`, never `cpu`."""
