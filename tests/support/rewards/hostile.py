"""Responses made to be executed, to never end, or to be misread. None is right, whatever the prompt.

Each `{witness}` stands for the path of a file that none may make.
"""

from pathlib import Path

DEEP_FRACTION = "\\boxed{" + "\\frac{1}{" * 3000 + "2" + "}" * 3000 + "}"
"""Its value is 2; what stands in its middle is one half."""

RESPONSES = {
    "an import": "__import__('os').system('touch {witness}')",
    "a boxed import": "\\boxed{__import__('os').system('touch {witness}')}",
    "an import as text": "$\\text{__import__('os').system('touch {witness}')}$",
    "an import among digits": "The answer is 4__import__('os').system('touch {witness}')2",
    "a class's way out": "().__class__.__base__.__subclasses__()",
    "a tower of powers": "9**9**9**9",
    "a boxed tower": "\\boxed{9^{9^{9^{9}}}}",
    "a factorial": "$((((9!)!)!)!)!$",
    "megabytes of boxes": "\\boxed{" * 500_000,
    "megabytes of dollars": "$" * 2_000_000,
    "a deep fraction": DEEP_FRACTION,
    "deep brackets": "\\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
    "a long sum": "\\boxed{" + "1+" * 5000 + "1}",
    "many roots": "\\sqrt" * 3000 + "{3}",
    "what keeps a bad pattern busy": "a" * 50_000 + "!",
    "half a surrogate pair": "\ud800\\boxed{\udfff}",
    "a null byte": "\x00\\boxed{\x00}",
    "nothing": "",
}


def responses(witness: Path) -> dict[str, str]:
    """Hostile responses by name; `witness` does not exist yet."""
    return {name: text.replace("{witness}", str(witness)) for name, text in RESPONSES.items()}


ORDERS = {
    "runs a program": "import os; os.system('touch {witness}')",
    "starts a program": "import subprocess; subprocess.run(['touch', '{witness}'])",
    "becomes a program": "import os; os.execv('/usr/bin/touch', ['touch', '{witness}'])",
    "writes a file": "open('{witness}', 'w')",
    "adds to a file": "open('{witness}', 'ab')",
    "makes a folder": "import os; os.mkdir('{witness}')",
    "makes a link": "import os; os.symlink('/', '{witness}')",
    "makes a socket with a name": "import socket; socket.socket(socket.AF_UNIX).bind('{witness}')",
    "calls home": "import socket; socket.create_connection(('127.0.0.1', 80), 1)",
    "sends a packet": "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
    "is a fork bomb": "import os\nwhile True: os.fork()",
    "is a thread bomb": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "is a bomb of small threads": (
        "import threading, time\nthreading.stack_size(2**16)\n"
        "while True: threading.Thread(target=time.sleep, args=(99,)).start()"
    ),
    "takes all memory": "x = []\nwhile True: x.append(bytearray(2**20))",
    "takes all memory at once": "x = bytearray(2**40)",
    "never ends": "while True: pass",
    "sleeps": "import time; time.sleep(10**6)",
    "prints for ever": "while True: print('x' * 10**6)",
    "exits": "import sys; sys.exit()",
    "exits at once": "import os; os._exit(0)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "interrupts": "raise KeyboardInterrupt",
    "catches signals and exceptions": (
        "import signal\n"
        "caught = signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGXCPU\n"
        "for one in caught: signal.signal(one, signal.SIG_IGN)\n"
        "signal.alarm(1)\n"
        "while True:\n"
        "  try:\n"
        "    while True: pass\n"
        "  except BaseException: pass"
    ),
    "kills its parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "kills its group": "import os, signal; os.killpg(0, signal.SIGKILL)",
    "leaves its group": "import os; os.setsid()",
    "lifts its limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1)); bytearray(2**40)",
    "traces its parent": "import ctypes, os; ctypes.CDLL(None, use_errno=True).ptrace(16, os.getppid(), 0, 0)",
    "floods its descriptors": (
        "import os\nwhile True:\n  for fd in range(3, 64):\n"
        "    try: os.write(fd, b'x' * 2**16)\n    except OSError: pass"
    ),
    "writes nonsense to its descriptors": (
        "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'[1, {}]\\n')\n  except OSError: pass"
    ),
}
"""Responses for a function that executes them."""


def orders(witness: Path) -> dict[str, str]:
    """Orders by name; `witness` does not exist yet."""
    return {name: text.replace("{witness}", str(witness)) for name, text in ORDERS.items()}
