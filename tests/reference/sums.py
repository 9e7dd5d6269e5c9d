"""Data for a small training job: sixty additions, which are read in no time."""

import json


def write_sums(folder):
    """A file of prompts and completions in ``folder``; its path as text."""
    file = folder / "sums.jsonl"
    rows = [{"prompt": f"{a} + {b} = ", "completion": str(a + b)} for a in range(10) for b in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)
