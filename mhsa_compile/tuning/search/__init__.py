"""The search for one op: its space, its study, where it begins and ends."""
