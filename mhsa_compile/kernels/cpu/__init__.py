"""Kernels for vector CPUs: AVX2, AVX-512, NEON, SVE, RVV. Imports `common` and `interface`, never `cuda`."""
