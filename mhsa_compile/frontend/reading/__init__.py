"""What of a file is understood: a table of (domain, operator); the rest is refused by name, before TVM sees it."""
