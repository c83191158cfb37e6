"""Analysis: blocks of a program, their strategies, and segments that repeat."""
