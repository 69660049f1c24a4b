"""Tells whoever wants to know what happens to sandboxes, by signed requests."""
