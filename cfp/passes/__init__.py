"""The passes that choose: profile and search. The race is in `cfp.race`."""
