"""Whole layers as one artifact each, of PyTorch's encoders and decoders and of transformers, where that is fastest."""
