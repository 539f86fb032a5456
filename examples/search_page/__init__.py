"""A page that searches a reader's own text by meaning, in the browser alone: `make search-page`, or docs/apps.md."""
