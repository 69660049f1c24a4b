"""Boxes as containers of a Docker Engine, under runc, gVisor's runsc or another runtime."""
