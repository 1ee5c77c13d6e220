"""Random regular expressions and context-free grammars, and which texts match them."""
