"""The version of this package, for who asks from within; everybody else reads `mhsa_compile.__version__`."""

__version__ = "0.1.0"
