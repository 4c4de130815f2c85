"""The demo's checker: are these the same words, in alphabetical order?"""


def check(prompt: str, completion: str) -> bool:
    """`sort: pear fig apple =` is answered right by ` apple fig pear`, and by nothing else."""
    words = prompt.removeprefix("sort:").removesuffix("=").split()
    return completion == "".join(f" {word}" for word in sorted(words))
