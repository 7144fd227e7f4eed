"""Soak: several client processes on one full daemon, dying and coming back, every byte verified."""
