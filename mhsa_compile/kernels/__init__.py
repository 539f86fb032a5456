"""Kernel templates: TIR for an operation, a target and a config. Which there are is in `registry`; what the rest of the
compiler sees of them in `base` and `operations`. Kernels know operations and targets, nothing of graphs and modules."""
