"""Files from outside, and files of ours: opened once, written whole or not at all. Imports `errors` alone."""
