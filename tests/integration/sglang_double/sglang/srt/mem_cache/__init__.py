"""See the package's docstring."""
