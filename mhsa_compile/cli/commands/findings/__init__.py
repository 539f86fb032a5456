"""What `mhsa doctor` looks at beside packages and processors: where files go."""
