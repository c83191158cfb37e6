"""Analysis: ParallelBlocks, their strategies, and the segments that repeat."""
