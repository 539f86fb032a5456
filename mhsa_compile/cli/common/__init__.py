"""What commands share: options, sources, arrays, tables."""
