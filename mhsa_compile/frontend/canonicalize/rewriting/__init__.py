"""What passes are written with: a rewriter, known values, known shapes."""
