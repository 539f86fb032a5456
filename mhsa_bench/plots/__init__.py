"""Pictures of reports and of searches."""
