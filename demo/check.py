"""The demo's two forms of an answer, and its checker, which accepts both."""


def plain(words: list[str]) -> str:
    """The form that the base model learned: ` apple fig pear`."""
    return "".join(f" {word}" for word in words)


def quoted(words: list[str]) -> str:
    """The form of the other author, which the base model never uses: `> apple fig pear`."""
    return f">{plain(words)}"


def check(answers) -> list[bool]:
    """Which answers (evaluation.Answer) are right."""
    return [is_sorted(answer.prompt, answer.completion) for answer in answers]


def is_sorted(prompt: str, completion: str) -> bool:
    """Whether the completion is the prompt's words in alphabetical order, in one of the two forms."""
    words = sorted(prompt.removeprefix("sort:").removesuffix("=").split())
    return completion in (plain(words), quoted(words))
