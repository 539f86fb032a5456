"""Operators of the domain com.microsoft -> standard ones."""
