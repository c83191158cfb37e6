"""A plan: its file, its text, and what it says of a program."""
