"""Whole programs, compiled and timed in turn: the fastest that fits is the plan."""
