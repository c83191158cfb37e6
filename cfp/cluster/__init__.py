"""Where builds and runs happen: machines, their schedulers, and what works on them."""
