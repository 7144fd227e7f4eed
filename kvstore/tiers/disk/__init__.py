"""The disk tier: blocks in preallocated segment files, their rows in LMDB, verified on every read.

`format` says what the bytes are, `files` moves them, `verify` checks a folder that no daemon uses.
The tier is used by the mover and the shell through `kvstore.tiers.base.Archive`.
"""
