"""Sessions that outlive their sandboxes, over the service. No HTTP in here."""
