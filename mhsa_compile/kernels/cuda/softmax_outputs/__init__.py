"""What a softmax is like: log-sum-exp, entropy, top_k, its probabilities. Imports `attention`."""
