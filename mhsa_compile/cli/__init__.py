"""The command `mhsa`. Imports all folders; what is heavy inside of functions, so that `--help` answers at once."""
