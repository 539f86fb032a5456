"""An ONNX graph in float64, and as PyTorch would compute it at the graph's dtype: what is right, and the yardstick."""
