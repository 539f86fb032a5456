"""Fused ONNX -> Relax with ops; all other operators by TVM's importer."""
