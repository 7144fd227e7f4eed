"""`make demo`: a language model, a daemon, and a second process that reuses the first one's KV."""
