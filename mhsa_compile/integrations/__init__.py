"""The way into people's models: attention of transformers and of PyTorch's layers, computed by compiled artifacts."""
