"""Whether what runs under a plan computes the same, and as fast."""
