"""Units that multiply, one class each: what an instruction takes, and how the factors of a product lie for it."""
