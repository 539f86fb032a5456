"""Pictures of reports and of masks."""
