"""ONNX -> ONNX: projections and attentions as single nodes of the domain `mhsa`, one pattern a file."""
