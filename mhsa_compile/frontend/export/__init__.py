"""A spec, a module or a file -> a checked ONNX model."""
