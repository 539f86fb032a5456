"""The same on a GPU, by events, against PyTorch's ways on the same tensors."""
