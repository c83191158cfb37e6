"""A plan as a page of HTML that needs nothing else: no network, no scripts."""
