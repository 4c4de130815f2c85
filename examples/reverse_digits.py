"""Another task for the demo: reverse digits. It writes a base model and data to out/digits.

Run it, then train on it:
    python examples/reverse_digits.py
    python kto.py --model out/digits/base --data.train out/digits/train.jsonl --optim.lr 7e-4
"""

from demo.check import plain, quoted
from demo.make import Task, make

task = Task(
    words=list("0123456789"),
    draw=lambda rng: rng.choices("0123456789", k=rng.randint(3, 7)),
    prompt=lambda digits: f"reverse: {' '.join(digits)} =",
    answer=lambda digits: digits[::-1],
    check=lambda p, c: c in (plain(p.split()[-2:0:-1]), quoted(p.split()[-2:0:-1])),
)
if __name__ == "__main__":
    make(task, "out/digits")
