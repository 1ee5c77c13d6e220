"""Workers that change their role: the services of both tiers over one engine."""
