"""Tuning records: what one says, where it fits, the files that hold them. Imports `target` and what is below it."""
