"""What several subcommands share: output, progress, and how to find and ask a running gateway."""
