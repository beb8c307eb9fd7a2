"""README and guides stay true: the example runs, links lead somewhere, commands and options exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def test_the_readme_example_runs(tmp_path):
    (example,) = blocks(README, "python")
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "what color is the circle?" in done.stdout
    code = [line for line in example.splitlines() if line.strip()]
    assert len(code) <= 12


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_relative_links_lead_to_files(guide):
    for target in re.findall(r"\]\(([^)\s]+)\)", guide.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("#"):
            assert (guide.parent / target.partition("#")[0]).exists(), f"{guide.name} links to {target}"


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_make_targets_exist(guide):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = guide.read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z]+)`|^make ([a-z]+)", text, flags=re.MULTILINE))
    assert {a or b for a, b in named} <= targets


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_commands_and_options_of_shell_blocks_exist(guide, run):
    for block in blocks(guide, "sh"):
        for line in block.splitlines():
            words = line.partition("#")[0].split()
            if not words or words[0] != "crossfuse":
                continue
            code, shown, _ = run(words[1], "--help")
            assert code == 0, line
            for option in re.findall(r"--[a-z-]+", line.partition("#")[0]):
                assert option in shown or option == "--threshold", f"{line}: {option} is no option"
