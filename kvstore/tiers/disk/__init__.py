"""The disk tier: blocks in preallocated segment files, their rows in LMDB, verified on every read.

`format` and `folder` say what the bytes are, `files` moves them, `verify` checks a folder that no
daemon uses. The mover and the shell use the tier through `kvstore.tiers.base.Archive`.
"""
