"""Adapters for inference engines, one module an engine. Importing this package loads none of
them."""
