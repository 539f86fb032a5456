"""Load an artifact and call it: no PyTorch, no ONNX, no compiler. Imports `spec`, `target` and what is below them."""
