"""The local provider: sandboxes on this very kernel, with nothing else installed."""
