"""python -m rate: what a browser gets from it, and what is in the file afterwards."""

import json
import os
import re
import shlex
import signal
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, Started, start, until
from tokens import bot, user, write

from infra.files import read_lines

QUESTION = [user("What is <b>rust</b>?")]
ANSWER = "Iron & <i>air</i>."


class Client:
    """A server in a process of its own, and what a page sends to it."""

    def __init__(self, folder: Path, *argv):
        self.process = Started(folder, "rate.__main__", [*argv, "--port=0"])
        until(self.says_url, within=60)

    def says_url(self) -> bool:
        said = [path.read_text() if path.exists() else "" for path in self.process.files]
        if os.waitpid(self.process.pid, os.WNOHANG)[0]:
            raise AssertionError(said)
        found = re.search(r"open (http://127\.0\.0\.1:\d+)", said[0])
        self.url = found and found[1]
        return bool(found)

    def __call__(self, path: str, body: dict | None = None, **headers) -> tuple[int, dict]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as e:
            return e.code, json.load(e)

    def rate(self, label: bool | None, completion: str = ANSWER, prompt=QUESTION) -> dict:
        body = {"prompt": prompt, "completion": completion, "label": label}
        code, reply = self("/rate", body)
        assert code == 200, reply
        return reply

    def kill(self) -> None:
        self.process.signal(signal.SIGKILL)
        self.process.ended()


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """opened(*argv) -> a Client of a new server, in a folder of the test."""
    clients = []
    monkeypatch.chdir(tmp_path)

    def opened(*argv) -> Client:
        clients.append(Client(tmp_path / f"server-{len(clients)}", *argv))
        return clients[-1]

    yield opened
    for client in clients:
        try:
            client.kill()
        except ProcessLookupError:
            pass  # the test has ended it


@pytest.fixture(scope="module")
def chat(chatty) -> str:
    """The option that names a model with a chat template."""
    return f"--model={chatty}"


@pytest.fixture(scope="module")
def page_of_module(chat, tmp_path_factory):
    """One server for the tests that ask it little, and its file."""
    folder = tmp_path_factory.mktemp("page")
    file = folder / "ratings.jsonl"
    file.write_text("")
    page = Client(folder / "out", chat, f"--ratings={file}")
    yield page, file
    page.kill()


def lines(file: str = "ratings.jsonl") -> list[dict]:
    return read_lines(Path(file))


def record(label: bool, answer: str = ANSWER) -> dict:
    """A rating as it shall stand in the file."""
    asked = {"prompt": QUESTION, "chat_template_kwargs": {}}
    return asked | {"completion": answer, "cut": False, "label": label}


# ---- thumbs --------------------------------------------------------------------------------------


def test_a_thumb_is_in_the_file_at_once_and_can_be_changed_and_withdrawn(page_of_module):
    page, file = page_of_module
    for label, expected in (
        (True, [True]),
        (True, [True]),
        (False, [False]),
        (None, []),
        (None, []),
    ):
        reply = page.rate(label)
        assert lines(file) == [record(x) for x in expected]
        assert (reply["up"], reply["down"]) == (label is True, label is False)
    # with marked parts
    body = {"prompt": QUESTION, "completion": "fig 🦊 apple", "label": True}
    apple = {"start": 6, "end": 11, "label": False}
    for spans in ([apple], [apple, apple | {"start": 0, "end": 3}], []):
        assert page("/rate", body | {"spans": spans})[0] == 200
        assert [(x.get("spans", []), x["label"]) for x in lines(file)] == [(spans, True)]
    page("/rate", body | {"label": None})


def test_a_killed_server_loses_no_thumb_and_an_open_page_goes_on_with_the_next_one(opened, chat):
    page = opened(chat)
    work = [threading.Thread(target=page.rate, args=(i % 2 == 0, f"answer {i}")) for i in range(30)]
    for thread in work:  # at once
        thread.start()
    for thread in work:
        thread.join()
    page.kill()
    following = opened(chat)
    assert following("/state")[1]["up"] == 15
    following.rate(False, "answer 4")  # shown before the kill, changed after it
    texts = {row["completion"]: row["label"] for row in lines()}
    assert texts == {f"answer {i}": i % 2 == 0 and i != 4 for i in range(30)}
    assert len(lines()) == 30, "no repeats, no contradictions"


def test_an_old_file_is_read_first_and_its_other_forms_and_fields_stay(opened, chat, tmp_path):
    old = {"messages": [*QUESTION, bot(ANSWER)], "kto_tag": True}
    plain = {"prompt": "1 + 1 =", "completion": " 2", "label": "up", "weight": 2}
    write(tmp_path / "ratings.jsonl", old, plain)
    page = opened(chat)
    for label, first in ((True, old), (False, record(False))):
        page.rate(label)
        assert lines() == [first, plain], "the same thumb once more changes nothing"


GOOD = '{"prompt": "q", "completion": "a", "label": true}'
REFUSED = [  # lines of the file of thumbs, more options, what is said
    ('{"prompt": "a"', "", "ratings.jsonl:2: Expecting ',' delimiter"),
    (GOOD.replace("true", "3"), "", "ratings.jsonl:2: label: expected true"),
    ('{"prompt": "a", "chosen": "b", "rejected": "c"}', "", "ratings.jsonl:2: record: a pair has"),
    (GOOD.replace("true", "false"), "", "the other label in an earlier line"),
    (GOOD, "--port=PORT", "port: PORT (0: any free one): Address already in use"),
    (GOOD, "--ratings=r.csv", "ratings: r.csv: expected a .jsonl file in a folder that exists"),
]


@pytest.mark.parametrize("text, option, fault", REFUSED)
def test_what_is_wrong_is_said_before_a_model_is_loaded(text, option, fault, tmp_path):
    file = tmp_path / "ratings.jsonl"
    before = f"{GOOD}\n{text}\n"
    file.write_text(before)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        option, fault = (x.replace("PORT", str(taken.getsockname()[1])) for x in (option, fault))
        argv = ["--model=no/such/model", "--port=0", f"--ratings={file}", *option.split()]
        code, _, said = Started(tmp_path / "out", "rate.__main__", argv).ended()
    assert code == 2 and fault in said and said.count("\n") == 1
    assert file.read_text() == before


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, body, said",
    [
        ("/answer", {"prompt": "word " * 200}, "begin a new chat"),
        ("/rate", {"prompt": 3, "completion": "a", "label": True}, "prompt: expected a string"),
        ("/rate", {"prompt": QUESTION, "completion": "a"}, "label: expected true, false or null"),
        ("/nothing", {}, "there is no such page"),
        ("/rate", [1], "request: expected an object"),
        ("/answer", {"record": 5}, "record: expected the fields of a record as a text of JSON"),
        ("/rate", {"record": "[", "label": True}, "record: expected the fields of a record"),
    ],
)
def test_what_goes_wrong_is_said_in_words_and_the_page_goes_on(path, body, said, page_of_module):
    page, _ = page_of_module
    code, reply = page(path, body)
    assert code in (400, 404) and said in reply["error"]
    assert page("/state")[0] == 200


# ---- prompts -------------------------------------------------------------------------------------


def test_the_prompts_of_a_file_are_shown_but_those_with_a_thumb(opened, chat, tmp_path):
    rows = [{"prompt": "one"}, {"messages": [*QUESTION]}, {"instruction": "two"}, {"prompt": "one"}]
    page = opened(chat, f"--prompts={write(tmp_path / 'prompts.jsonl', *rows)}")
    one, two = ([user(text)] for text in ("one", "two"))

    def shown() -> list:
        return [card["prompt"] for card in page("/state")[1]["cards"]]

    assert shown() == [one, QUESTION, two] and page("/state")[1]["mode"] == "cards"
    page.rate(True)
    assert shown() == [one, two]


# ---- who may ask ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers, code",
    [
        ({}, 200),
        ({"Host": "localhost:1234", "Origin": "http://localhost:1234"}, 200),
        ({"Host": "["}, 403),
        ({"Host": "evil@localhost"}, 403),
        ({"Host": "evil.example"}, 403),  # a name that somebody points at 127.0.0.1
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),  # another program's page
        ({"Content-Type": "text/plain"}, 400),  # what a form of another site may send
    ],
)
def test_only_the_page_itself_is_answered(headers, code, page_of_module):
    page, file = page_of_module
    body = {"prompt": QUESTION, "completion": f"{headers}", "label": True}
    before = file.read_text()
    assert page("/rate", body, **headers)[0] == code
    assert (file.read_text() != before) == (code == 200)
    if "Content-Type" not in headers:
        assert page("/state", None, **headers)[0] == code


def test_the_page_sets_texts_as_text_and_loads_nothing_from_elsewhere(page_of_module):
    page, _ = page_of_module
    with urllib.request.urlopen(page.url) as reply:
        text = reply.read().decode()
        policy = reply.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write", text)
    assert not re.search(r"https?://|src=", text)


# ---- training ------------------------------------------------------------------------------------


def test_the_command_on_the_page_trains_on_the_thumbs(opened, tiny, monkeypatch):
    page = opened(f"--model={tiny}", "--ratings=my ratings.jsonl")
    for i in range(10):
        reply = page.rate(i < 2, f" answer {i}", f"question {i}")
        assert bool(reply["command"]) == (i >= 7), "a batch, and both kinds"
    page.process.signal(signal.SIGINT)
    code, said, _ = page.process.ended()
    assert code == 0 and f"train on them: {reply['command']}" in said
    python, program, *argv = shlex.split(reply["command"])
    assert (python, Path(program).resolve()) == ("python", ROOT / "kto.py")
    start("kto", [*argv, "--precision=32-true", "--progress=false"])
    weights = yaml.safe_load(Path("out/thumbs-1/settings.yaml").read_text())["kto"]
    # by hand: 2 up and 8 down count as 5 each
    assert (weights["desirable_weight"], weights["undesirable_weight"]) == (2.5, 0.625)
    assert Path("out/thumbs-1/final").is_dir()
    again = opened(f"--model={tiny}", "--ratings=my ratings.jsonl")
    assert "--out_dir out/thumbs-2" in again("/state")[1]["command"]
