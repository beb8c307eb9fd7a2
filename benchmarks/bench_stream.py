"""The streaming benchmark with everything that `make bench` judges: both shapes, and 10,000 endless frames.

    python benchmarks/bench_stream.py [--frames 60] [--every 1] [--endless 10000] [--shape smollm2-135m] [--quick]

The options are those of `crossfuse bench stream`, which does the work; here `--endless` is 10,000 unless it is given.
"""

from __future__ import annotations

import sys

from crossfuse.cli.main import main

if __name__ == "__main__":
    given = sys.argv[1:]
    if not any(argument.split("=")[0] == "--endless" for argument in given):
        given = ["--endless", "10000", *given]
    main(["bench", "stream", *given])
