"""Code that several subcommands share: output, progress, and the client of a running gateway."""
