"""Kernel templates: how an op is computed on a target. Imports `spec` and `target`; nothing of graphs or modules;
`registry` lists them."""
