"""Everything shown of a plan: a view, made once, and its renderers in text and HTML."""
