"""nn.Module or ONNX -> Relax with ops. Knows no target, and of kernels only `kernels.interface`."""
