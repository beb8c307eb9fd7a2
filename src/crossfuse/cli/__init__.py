"""The `crossfuse` command: one file a subcommand. Slow libraries are imported where they are used."""
