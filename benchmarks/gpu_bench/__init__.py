"""Every candidate on a GPU, timed by events, against PyTorch's ways on the same tensors."""
