"""Exercises on attention: a function to complete each, checked against compiled artifacts. README.md says how."""
