"""Where to compute: target profiles, this machine, what is installed. Imports `errors` and `files`; no NumPy."""
