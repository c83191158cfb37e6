"""Checks of results and step times under a plan, against one device."""
