"""Bundles of JavaScript, run in Node."""
