"""`python -m kvstore_client.demo`: a language model, a daemon and a second process that reuses its
KV."""
