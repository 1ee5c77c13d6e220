"""Who may use the router: API keys, where they come from, and what each may do."""
