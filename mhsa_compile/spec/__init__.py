"""What to compute: AttentionSpec and the values that a spec can hold. Imports `errors` and `files`, no framework."""
