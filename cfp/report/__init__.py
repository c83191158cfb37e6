"""Tables, texts and pictures of plans."""
