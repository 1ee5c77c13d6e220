"""Messages between processes of one host: the receiver copies them out of memory that both have mapped."""
