"""The `pdserve` command: one module per subcommand, imported only when it is the one that runs."""
