"""A tiered KV cache store for LLM serving: the library under the daemon and the client."""

__version__ = "0.1.0"
