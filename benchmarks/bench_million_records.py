"""Open a JSON array of a million LLaVA-like records (about 1 GB): memory and time.

    python benchmarks/bench_million_records.py [--records 1000000] [--keep FILE]

Writes the file, then opens it in a process of its own: `load_records` on the array, 20,000 records by random numbers,
and one pass over a stream of it. Prints peak resident memory (MiB) and CPU seconds of each part as JSON. No image
exists, so none can be read.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = ("the", "image", "shows", "a", "man", "\\", '"quoted"', "{braces}", "[brackets]", "riding", "é", "near", "red")


def write(path: Path, records: int) -> None:
    """One in sixteen has no image, as in the 665k mix; one to four questions; a third with escaped letters."""
    draw = random.Random(0)
    sentences = [" ".join(draw.choices(WORDS, k=draw.randint(8, 60))) for _ in range(2000)]
    with path.open("w", encoding="utf-8") as file:
        for number in range(records):
            row: dict[str, object] = {"id": f"{number:012d}"}
            talk = []
            for turn in range(draw.randint(1, 4)):
                question = draw.choice(sentences)
                if turn == 0 and number % 16:
                    row["image"] = f"coco/train2017/{number:012d}.jpg"
                    question = f"<image>\n{question}" if number % 3 else f"{question}\n<image>"
                talk += [{"from": "human", "value": question}, {"from": "gpt", "value": draw.choice(sentences)}]
            row["conversations"] = talk
            file.write((",\n" if number else "[") + json.dumps(row, ensure_ascii=number % 3 == 0))
        file.write("]\n")


def measure(path: Path) -> dict[str, float]:
    """In the process that opens the file."""
    from crossfuse.data.formats import load_records

    result: dict[str, float] = {"import_mib": _peak()}
    start = time.process_time()
    data = load_records(path)
    result |= {"records": len(data), "open_cpu_s": time.process_time() - start, "open_mib": _peak()}
    draw, start = random.Random(1), time.process_time()
    for _ in range(20_000):
        number = draw.randrange(len(data))
        assert int(data[number].id) == number
    result |= {"random_records_a_cpu_s": 20_000 / (time.process_time() - start), "random_mib": _peak()}
    start, seen = time.process_time(), 0
    for record in load_records(path, streaming=True):
        seen += len(record.messages) > 0
    assert seen == len(data)
    return result | {"stream_records_a_cpu_s": seen / (time.process_time() - start), "stream_mib": _peak()}


def _peak() -> float:
    # Not getrusage, whose maximum is inherited from the process that started this one.
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path, help="use this file, and write it where it is missing")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.keep or Path(folder) / "million.json"
        if not path.exists():
            write(path, options.records)
        made = subprocess.run([sys.executable, __file__, "--measure", str(path)], capture_output=True, text=True)
        if made.returncode:
            sys.exit(made.stderr)
        result = {"file_mib": path.stat().st_size / 2**20, **json.loads(made.stdout)}
    print(json.dumps({name: round(value, 1) for name, value in result.items()}, indent=2))


if __name__ == "__main__":
    main()
