"""Every candidate in one process, in turns, with the machine's limits."""
