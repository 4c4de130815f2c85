from kto import main
from runs.errors import run_cli

if __name__ == "__main__":  # short answers are right
    run_cli(lambda: main(checker=lambda p, answer: len(answer.split()) < 4))
