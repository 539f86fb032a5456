"""ONNX -> ONNX: whatever dialect a file's attention is written in, the operator Attention says it after this."""
