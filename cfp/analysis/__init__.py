"""Analysis: blocks, their strategies, segments that repeat; presets by name."""
