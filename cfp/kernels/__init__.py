"""What may compute parts of a step in another way: one protocol, and the list."""
