"""Views of a plan: rows and texts, made once and rendered as text and HTML."""
