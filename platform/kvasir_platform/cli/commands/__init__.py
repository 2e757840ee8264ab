"""The subcommands of `kvasir`, one module each, imported only when it runs."""
