"""`python -m crossfuse`: the same as the `crossfuse` command."""

from crossfuse.cli.main import main

if __name__ == "__main__":
    main()
