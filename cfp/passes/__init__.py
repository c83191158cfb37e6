"""The passes that choose: profile and search. The last one, the race, has a room."""
