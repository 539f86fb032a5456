"""How compiled code runs its parallel loops: the C that every artifact carries, and what Python says to it."""
