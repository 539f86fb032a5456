"""One group of commands a file."""
