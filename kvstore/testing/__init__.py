"""Testing: what simulations, soaks and users' own tests share.

Ships with the library; nothing of it runs in production.
"""
