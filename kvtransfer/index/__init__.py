"""The prefix index: which worker holds which KV block, published to Redis and mirrored in each router."""
