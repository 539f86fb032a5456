"""Semantic search over text files that a person drops on a page: `make search-app`, or docs/apps.md."""
