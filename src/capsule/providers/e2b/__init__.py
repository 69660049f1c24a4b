"""Boxes as sandboxes of E2B's cloud, or of whoever speaks its API, through E2B's own SDK."""
