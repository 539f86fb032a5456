"""Find the fastest configs: all ops of a source, in a session. Imports `bench` and all below it."""
