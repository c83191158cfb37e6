"""The passes that choose: profile, search and trade-off. The race is in `cfp.race`."""
