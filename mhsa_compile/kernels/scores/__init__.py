"""The features of attention scores, in the order of `order.py`. Imports the parts of both families."""
