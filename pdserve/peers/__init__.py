"""The processes of one cluster: who they are, and how they prove it."""
