"""Tiers: where block bytes are, and nothing about which block deserves to be there."""
