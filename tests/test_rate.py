"""python -m rate: what a browser gets from it, and what is in the file afterwards. The other side of
--server is a stand-in."""

import json
import os
import re
import shlex
import shutil
import signal
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, Started, start, until

from infra.settings import Data
from models.hub import Source
from rate.desk import training_command
from rate.ratings import Ratings
from records.examples import load_examples
from records.tokenizer import Tokenizer

QUESTION = [{"role": "user", "content": "What is <b>rust</b>?"}]
ANSWER = "Iron & <i>air</i>."


class Client:
    """A server in a process of its own, and what a page sends to it."""

    def __init__(self, folder: Path, *argv, program: str = "rate.__main__"):
        self.process = Started(folder, program, [*argv])
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

    def rate(self, label: bool | None, prompt=QUESTION, completion: str = ANSWER) -> dict:
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

    def opened(*argv, program: str = "rate.__main__", port: str = "--port=0") -> Client:
        client = Client(tmp_path / f"server-{len(clients)}", *argv, port, program=program)
        clients.append(client)
        return client

    yield opened
    for client in clients:
        try:
            client.kill()
        except ProcessLookupError:
            pass  # the test has ended it


@pytest.fixture
def other(monkeypatch):
    """An OpenAI-compatible server: its address, its requests, and what it replies next."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"data": [{"id": "big-model"}]})

        def do_POST(self):
            size = int(self.headers["Content-Length"])
            server.asked.append(json.loads(self.rfile.read(size)))
            choice = {
                "message": {"content": f"Answer {len(server.asked)}"},
                "finish_reason": "stop",
            }
            self.reply({"choices": [choice | server.choice]})

        def reply(self, body: dict) -> None:
            self.send_response(server.code)
            self.end_headers()
            self.wfile.write(json.dumps(body if server.code == 200 else server.failure).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.choice, server.code, server.failure = [], {}, 200, {}
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def lines(file: str = "ratings.jsonl") -> list[dict]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def record(label: bool, answer: str = ANSWER) -> dict:
    """A rating as it shall stand in the file."""
    return {"prompt": QUESTION, "completion": answer, "cut": False, "label": label}


# ---- thumbs --------------------------------------------------------------------------------------


def test_a_thumb_is_in_the_file_at_once_and_can_be_changed_and_withdrawn(opened, other):
    page = opened(f"--server={other.url}")
    for label, expected, counted in (
        (True, [record(True)], (1, 0)),
        (True, [record(True)], (1, 0)),
        (False, [record(False)], (0, 1)),
        (None, [], (0, 0)),
        (None, [], (0, 0)),
    ):
        reply = page.rate(label)
        assert (lines(), (reply["up"], reply["down"])) == (expected, counted)
    page.rate(True)
    page.rate(False, completion="Another answer")
    assert lines() == [record(True), record(False, "Another answer")]


def test_a_killed_server_loses_no_thumb_and_an_open_page_goes_on_with_the_next_one(opened, other):
    page = opened(f"--server={other.url}")
    for i in range(5):
        page.rate(i % 2 == 0, completion=f"answer {i}")
    page.kill()
    following = opened(f"--server={other.url}")
    assert following("/state")[1]["up"] == 3
    following.rate(False, completion="answer 4")  # shown before the kill, changed after it
    following.rate(True, completion="answer 0")
    expected = [record(i in (0, 2), f"answer {i}") for i in range(5)]
    assert lines() == expected, "no repeats, no contradictions"


def test_a_file_of_thumbs_may_be_a_link_and_keeps_its_mode(tmp_path):
    shared = tmp_path / "shared" / "all.jsonl"
    shared.parent.mkdir()
    shared.write_text("")
    shared.chmod(0o664)
    link = tmp_path / "ratings.jsonl"
    link.symlink_to(shared)
    Ratings(link).set({"prompt": "p", "completion": "c"}, True)
    assert link.is_symlink() and json.loads(shared.read_text())["label"] is True
    assert shared.stat().st_mode & 0o777 == 0o664


def test_many_thumbs_at_once_are_all_in_the_file(opened, other):
    page = opened(f"--server={other.url}")
    work = [
        threading.Thread(target=page.rate, args=(i % 3 > 0, QUESTION, f"answer {i}"))
        for i in range(30)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    texts = {row["completion"]: row["label"] for row in lines()}
    assert texts == {f"answer {i}": i % 3 > 0 for i in range(30)}


def test_an_old_file_is_read_first_and_its_other_forms_and_fields_stay(opened, other, tmp_path):
    old = {"messages": [*QUESTION, {"role": "assistant", "content": ANSWER}], "kto_tag": True}
    plain = {"prompt": "1 + 1 =", "completion": " 2", "label": "up", "weight": 2}
    text = "".join(json.dumps(row) + "\n" for row in (old, plain))
    (tmp_path / "ratings.jsonl").write_text(text)
    page = opened(f"--server={other.url}")
    assert page("/state")[1]["up"] == 2
    page.rate(True)
    assert lines() == [old, plain], "the same thumb once more changes nothing"
    page.rate(False)
    assert lines() == [record(False), plain]


@pytest.mark.parametrize(
    "text, fault",
    [
        ('{"prompt": "a"', "ratings.jsonl:2: Expecting ',' delimiter"),
        ('{"prompt": "a", "completion": "b", "label": 3}', "ratings.jsonl:2: label: expected true"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}', "ratings.jsonl:2: record: a pair has"),
        (
            '{"prompt": "q", "completion": "a", "label": false}',
            "the other label in an earlier line",
        ),
    ],
)
def test_a_bad_line_of_an_old_file_is_refused_and_nothing_is_written(text, fault, tmp_path):
    file = tmp_path / "ratings.jsonl"
    before = f'{{"prompt": "q", "completion": "a", "label": true}}\n{text}\n'
    file.write_text(before)
    argv = ["--server=http://127.0.0.1:9", "--model=m", f"--ratings={file}"]
    code, _, said = Started(tmp_path / "out", "rate.__main__", argv).ended()
    assert code == 2 and fault in said and said.count("\n") == 1
    assert file.read_text() == before


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["--plain=true", "--chat_template_kwargs=x=1"])
def test_a_setting_that_a_server_does_not_get_is_refused(setting, tmp_path):
    argv = ["--server=http://127.0.0.1:9", "--model=m", setting]
    code, _, said = Started(tmp_path / "out", "rate.__main__", argv).ended()
    name = setting[2:].partition("=")[0]
    assert code == 2 and said.startswith(f"error: {name}: not with --server")


def test_a_server_is_asked_with_the_whole_conversation_and_an_answer_brings_its_thumb(
    opened, other
):
    argv = "--max_new_tokens=7", "--temperature=0.5", "--top_p=0.9"
    page = opened(f"--server={other.url}/v1/", *argv)
    turns = [
        *QUESTION,
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "Why?"},
    ]
    code, reply = page("/answer", {"prompt": turns})
    whose = {"model": "big-model"}
    line = json.loads(reply.pop("record"))
    assert (code, reply) == (200, {"text": "Answer 1", "cut": False, "label": None} | whose)
    assert line == {"prompt": turns, "completion": "Answer 1", "cut": False}
    expected = {"model": "big-model", "messages": turns, "max_tokens": 7, "temperature": 0.5}
    assert other.asked[0] == expected | {"top_p": 0.9}
    page.rate(False, turns, "Same")
    assert page("/label", {"prompt": turns, "completion": "Same"}) == (200, {"label": False})
    assert page("/label", {"prompt": turns, "completion": "same"}) == (200, {"label": None})
    other.choice = {"message": {"content": "Same"}, "finish_reason": "length"}
    reply = page("/answer", {"prompt": turns})[1]
    assert json.loads(reply.pop("record"))["cut"] is True
    assert reply == {"text": "Same", "cut": True, "label": False} | whose


def test_a_server_gets_no_field_that_is_not_needed(opened, other):
    """TGI refuses a top_p of 1, Mistral's API a seed."""
    opened(f"--server={other.url}")("/answer", {"prompt": QUESTION})
    assert other.asked[0].keys() == {"model", "messages", "temperature", "max_tokens"}


def test_an_answer_whose_thoughts_the_server_keeps_apart_is_refused(opened, other):
    page = opened(f"--server={other.url}")
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "2 and 2"}]}
    text = {"type": "text", "text": "4"}
    for message in (
        {"content": "4", "reasoning_content": "2 and 2"},
        {"content": None, "reasoning": "2 and"},
        {"content": [thinking, text]},
    ):
        other.choice = {"message": message}
        code, reply = page("/answer", {"prompt": QUESTION})
        assert code == 400 and "the model's thoughts apart" in reply["error"]
    for message in ({"content": "4", "reasoning_content": None}, {"content": [text]}):
        other.choice = {"message": message}
        assert page("/answer", {"prompt": QUESTION})[1]["text"] == "4"


def test_the_own_model_answers_as_transformers_does(opened, tiny):
    page = opened(f"--model={tiny}", "--temperature=0", "--max_new_tokens=9")
    assert page("/state")[1]["chat"] is False, "this model has no chat template"
    prompt = "The cat sat on"
    code, reply = page("/answer", {"prompt": prompt})
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    theirs = model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)[
        0, ids.shape[1] :
    ]
    assert code == 200 and reply["text"] == tokenizer.decode(theirs, skip_special_tokens=True)
    assert reply["cut"] is (theirs[-1].item() != 0)
    page.rate(True, prompt, reply["text"])
    rating = {"prompt": prompt, "completion": reply["text"], "cut": False, "label": True}
    assert lines() == [rating], "the request did not say that it was cut"
    code, reply = page("/answer", {"prompt": "word " * 200})
    assert code == 400 and "begin a new chat" in reply["error"]


def test_what_goes_wrong_is_said_in_words_and_the_page_goes_on(opened, other):
    page = opened(f"--server={other.url}")
    other.code, other.failure = 503, {"error": "the model is loading"}
    code, reply = page("/answer", {"prompt": QUESTION})
    assert code == 400 and "503" in reply["error"] and "the model is loading" in reply["error"]
    other.code, other.choice = 200, {"message": None}
    error = page("/answer", {"prompt": QUESTION})[1]["error"]
    assert """choices[0].message.content: {"choices": [{"message": null""" in error
    other.choice = {}
    assert page("/answer", {"prompt": QUESTION})[0] == 200
    assert page("/rate", {"prompt": 3, "completion": "a", "label": True})[0] == 400
    assert page("/rate", {"prompt": QUESTION, "completion": "a"})[1]["error"].startswith("label: ")


def test_a_redirect_of_the_server_is_a_fault_and_takes_the_key_nowhere(
    opened, tmp_path, monkeypatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Authorization"]))
            self.send_response(302)
            self.send_header("Location", f"http://localhost:{server.server_port}/elsewhere")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    page = opened(f"--server={url}", "--model=m")
    code, reply = page("/answer", {"prompt": QUESTION})
    assert code == 400 and reply["error"].startswith(
        f"server: {url}/v1/chat/completions: 302 Found"
    )
    code, _, said = Started(tmp_path / "out", "rate.__main__", [f"--server={url}"]).ended()
    assert code == 2 and said.startswith(f"error: server: {url}/v1/models: 302 Found")
    assert said.count("\n") == 1
    assert asked == [("/v1/chat/completions", "Bearer secret"), ("/v1/models", "Bearer secret")]
    server.shutdown()
    server.server_close()


# ---- prompts -------------------------------------------------------------------------------------


def test_the_prompts_of_a_file_are_shown_but_those_with_a_thumb(opened, other, tmp_path):
    rows = [{"prompt": "one"}, {"messages": [*QUESTION]}, {"instruction": "two"}, {"prompt": "one"}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "prompts.jsonl").write_text(text)
    page = opened(f"--server={other.url}", "--prompts=prompts.jsonl")
    one, two = ([{"role": "user", "content": text}] for text in ("one", "two"))
    state = page("/state")[1]
    assert state["mode"] == "cards"
    assert [card["prompt"] for card in state["cards"]] == [one, QUESTION, two]
    page.rate(True)
    assert [card["prompt"] for card in page("/state")[1]["cards"]] == [one, two]


def test_a_server_is_asked_with_a_prompts_tools_but_not_with_settings_of_its_template(
    opened, other, tmp_path
):
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"prompt": "one", "tools": tools}, {"prompt": "one", "chat_template_kwargs": {"x": 1}}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps(rows[0]) + "\n")
    page = opened(f"--server={other.url}", f"--prompts={file}")
    (card,) = page("/state")[1]["cards"]
    assert page("/answer", {"record": card["record"]})[0] == 200
    assert other.asked[0]["tools"] == tools
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [f"--server={other.url}", f"--prompts={file}", "--port=0"]
    code, _, said = Started(tmp_path / "out", "rate.__main__", argv).ended()
    assert code == 2 and "prompts.jsonl:2: chat_template_kwargs: a server is asked without" in said


# a day, tools, and a setting
TEMPLATE = """
{%- if strftime_now is defined %}{{ strftime_now('%Y %j') }} {% endif %}{{ style or '' }}
{%- for t in tools or [] %}tool {{ t.function.name }} {% endfor %}
{%- for m in messages %}{{ '<' + m.role + '>' + m.content + '<|pad|>' }}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}
"""


def test_thumbs_train_the_prompts_that_were_answered_and_equal_questions_may_differ_otherwise(
    opened, tiny, tmp_path
):
    """By transformers' own rendering. The whole number beside a prompt has more bits than one of a browser."""
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    own_style = {"chat_template_kwargs": {"style": "b"}}
    more = [{}, {"tools": tools}, own_style, {"date": "2020-02-03"}, {"id": 2**62 + 1}, {}]
    rows = [{"prompt": "one"} | fields for fields in more]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = f"--model={model}", "--prompts=p.jsonl", "--chat_template_kwargs=style=a"
    page = opened(*argv, "--max_new_tokens=3")
    cards = page("/state")[1]["cards"]
    assert len(cards) == 5, "the last one is the first one again"
    for i, card in enumerate(cards):
        answer = page("/answer", {"record": card["record"]})[1]
        assert page("/rate", {"record": answer["record"], "label": i % 2 == 0})[0] == 200
        assert len(page("/state")[1]["cards"]) == 4 - i
        assert page("/label", {"record": answer["record"]})[1] == {"label": i % 2 == 0}
    page("/rate", {"prompt": QUESTION, "completion": ANSWER, "label": True})  # of a chat
    assert lines()[4]["id"] == 2**62 + 1
    t = transformers.AutoTokenizer.from_pretrained(model)
    expected = []
    for fields in [*more[:5], {"prompt": QUESTION}]:
        fields = {"style": "a"} | fields | fields.get("chat_template_kwargs", {})
        prompt = fields.get("prompt", [{"role": "user", "content": "one"}])
        given = dict(tools=fields.get("tools"), style=fields["style"], add_generation_prompt=True)
        text = t.apply_chat_template(prompt, tokenize=False, **given)
        if "date" in fields:
            text = text.replace(text[:8], "2020 034")
        expected.append(t.encode(text, add_special_tokens=False))
    tokenizer = Tokenizer(Source(model), None, "2021-05-06", "style=c")
    data = Data("ratings.jsonl", max_prompt=99, max_completion=20)
    examples, _ = load_examples("ratings.jsonl", tokenizer, "rated", data)
    assert [list(e.prompt) for e in examples] == expected
    assert [e.label for e in examples] == [True, False, True, False, True, True]


def test_a_port_that_is_taken_is_refused_before_the_model_is_loaded(other, tmp_path):
    port = other.server_port
    argv = ["--model=no/such/model", f"--port={port}", f"--ratings={tmp_path / 'ratings.jsonl'}"]
    code, _, said = Started(tmp_path / "out", "rate.__main__", argv).ended()
    assert (code, said) == (2, f"error: port: {port} (0: any free one): Address already in use\n")


# ---- who may ask ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers, code",
    [
        ({}, 200),
        ({"Host": "localhost:1234", "Origin": "http://localhost:1234"}, 200),
        ({"Host": "evil.example"}, 403),  # a name that somebody points at 127.0.0.1
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),  # another program's page
        ({"Content-Type": "text/plain"}, 400),  # what a form of another site may send
    ],
)
def test_only_the_page_itself_is_answered(headers, code, page_of_module):
    page, folder = page_of_module
    body = {"prompt": QUESTION, "completion": f"{headers}", "label": True}
    before = (folder / "ratings.jsonl").read_text()
    assert page("/rate", body, **headers)[0] == code
    assert ((folder / "ratings.jsonl").read_text() != before) == (code == 200)
    if "Content-Type" not in headers:
        assert page("/state", None, **headers)[0] == code


@pytest.fixture(scope="module")
def page_of_module(tmp_path_factory):
    """One server for the tests that ask it little, with one thumb; its folder."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "ratings.jsonl").write_text("")
    argv = ["--server=http://127.0.0.1:9", "--model=m", f"--ratings={folder / 'ratings.jsonl'}"]
    page = Client(folder / "out", *argv, "--port=0")
    yield page, folder
    page.kill()


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
        reply = page.rate(i < 2, f"question {i}", f" answer {i}")
        assert bool(reply["command"]) == (i >= 7), "a batch, and both kinds"
    page.process.signal(signal.SIGINT)
    code, said, _ = page.process.ended()
    assert code == 0 and f"train on them: {reply['command']}" in said
    python, program, *argv = shlex.split(reply["command"])
    assert (python, Path(program).resolve()) == ("python", ROOT / "kto.py")
    assert argv[-2:] == ["--kto.desirable_weight", "4"], "2 up, 8 down"
    start("kto", [*argv, "--precision=32-true", "--progress=false"])
    assert Path("out/thumbs-1/final").is_dir()
    again = opened(f"--model={tiny}", "--ratings=my ratings.jsonl")
    assert "--out_dir out/thumbs-2" in again("/state")[1]["command"]


@pytest.mark.parametrize(
    "up, down, weights", [(20, 20, []), (15, 20, []), (30, 10, ["un", "3"]), (5, 40, ["", "8"])]
)
def test_a_rare_kind_of_thumb_gets_its_class_weight(up, down, weights):
    """By hand: the rarer kind, with its weight, counts as much as the other one."""
    words = training_command("m", Path("r.jsonl"), up, down, "out/t")
    expected = [f"--kto.{weights[0]}desirable_weight", weights[1]] if weights else []
    assert words[10:] == expected
