"""The classic strategies, and what an argument is for."""
