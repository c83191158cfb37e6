"""A step under a plan, compiled and called."""
