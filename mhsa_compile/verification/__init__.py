"""What is right: the float64 oracle, the error budget, checks of an artifact. Imports `nn`, `runtime` and below."""
