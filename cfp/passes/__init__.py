"""The passes analyze, profile and search. The race is in `cfp.race`."""
