"""MatMul, Softmax, MatMul -> Attention, with the masks and scales between them."""
