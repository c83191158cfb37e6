"""The machine: a described cluster, and one GPU that plays one of N."""
