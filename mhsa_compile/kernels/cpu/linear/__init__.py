"""Linear layers of packed weights. Imports `simd`."""
