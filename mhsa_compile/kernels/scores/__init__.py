"""The features of attention scores, one class a file, listed in `order.py`. Imports the parts of both families."""
