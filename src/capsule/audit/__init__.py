"""Who did what to which sandbox: a trail that proves that nothing in it was changed."""
