"""One pass a file, each ONNX -> ONNX."""
