"""Random cases and damaged files, drawn from a seed; `make` targets run them, with tests/ in PYTHONPATH."""
