"""Long runs that print figures; each is a `make` target, with tests/ in PYTHONPATH."""
