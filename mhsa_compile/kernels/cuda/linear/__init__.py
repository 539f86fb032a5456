"""Linear layers on tensor cores, CUDA cores and Hopper's wgmma. Imports `primitives`."""
