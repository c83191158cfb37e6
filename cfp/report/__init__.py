"""What a person sees of plans: tables and pictures."""
