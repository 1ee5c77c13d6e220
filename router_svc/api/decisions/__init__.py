"""Questions about an input, answered by the probabilities of the tokens that could come next."""
