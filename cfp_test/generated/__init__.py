"""Step functions drawn at random, as graphs of ops of many kinds."""
