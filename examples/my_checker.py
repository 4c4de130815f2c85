"""Your own checker: short answers are right. Run it: python examples/my_checker.py"""

from infra.console import run_cli
from kto import main


def check(answers) -> list[bool]:
    """answers: a list of evaluation.Answer, each with its prompt, completion, fields (data.extra) and cut."""
    return [len(answer.completion.split()) < 4 for answer in answers]


if __name__ == "__main__":
    run_cli(lambda: main(checker=check))
