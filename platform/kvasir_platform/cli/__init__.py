"""The `kvasir` command: one file per subcommand, imported only when it runs."""
