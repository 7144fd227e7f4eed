"""The daemon: kvstored. Everything that listens, and the life cycle around the store."""
