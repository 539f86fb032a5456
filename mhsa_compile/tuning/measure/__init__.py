"""The device's side of tuning: light, for machines that have no compiler. Imports `records`, `runtime`, `target`."""
