"""The command `mhsa`. Imports everything, inside of functions, so that `--help` loads nothing."""
