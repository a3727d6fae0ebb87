"""Asks vLLM many questions in one process, for its import takes long: JSON on stdin, answers to the file named."""

import json
import sys
from pathlib import Path

from millrace.preflight.vllm import Question, look

if __name__ == "__main__":
    answers = {name: look(Question(**values)) for name, values in json.load(sys.stdin).items()}
    Path(sys.argv[1]).write_text(json.dumps(answers))
