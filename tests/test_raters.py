"""Who rates online answers in examples/: a model behind a server, a reward model, the best against the worst."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokens
import torch
import transformers
from conftest import learned, of_iteration, refused, train
from test_forks import ONLINE

import judge as judge_file
import online_dpo
import reward_model as reward_file
from evaluation import Answer
from infra.console import BadInput, Failed
from judge import Judge, Judged, JudgeSettings, Server, judge, verdict
from records.examples import Example

COMMON = ("--batch_size=6", "--precision=32-true", "--eval.samples=0", *ONLINE)


# ---- examples/judge.py ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(judge_file, "WAITS", (0, 0, 0))


def begun(folder: Path, server: str, **settings) -> Judge:
    """A judge as a run of one process begins it."""
    args = JudgeSettings(**{"model": "m", "server": server, "prompt": "{completion}", **settings})
    fabric = SimpleNamespace(world_size=1, device="cpu")
    stop = SimpleNamespace(check=lambda *_, **__: None)
    one = Judge()
    one.begin(
        SimpleNamespace(cfg=SimpleNamespace(judge=args), folder=folder, fabric=fabric, stop=stop)
    )
    return one


def answers(*texts: str) -> list[Answer]:
    return [Answer("p", text, {}, False) for text in texts]


VERDICTS = {
    True: [
        "YES",
        "It says no such thing.\nSo: **Yes**.\n",
        "YES\n```",
        "YES.\n\n---\n",
        r"\boxed{YES}",
        "<answer>yes</answer>",
        "The verdict: yes",
        "<think>There is no error.</think>YES",
    ],
    False: ["yes\nNo.", "**NO**", "NO</s>", "An error.\nYES?\n</think>\n\nNO"],
    None: [
        "",
        "maybe",
        "yes or no?",
        "yes\nperhaps",
        "nobody knows yesterday",
        "YES\n\n(Note: there is no way to be sure)",
        "---",
        "<think>\nIs it right?\nYES",
        "<think>\nIs it right?\nYES\n</think>",
    ],
}


@pytest.mark.parametrize("expected", VERDICTS)
def test_a_verdict_is_the_one_word_of_the_last_line_after_the_thoughts(expected):
    for reply in VERDICTS[expected]:
        assert verdict(reply) is expected, reply


def test_a_question_has_the_answers_own_texts_and_the_request_what_the_settings_say(
    judge_server, tmp_path
):
    text = "{kind} | {prompt} | {completion} | {other}"
    request = '{"max_completion_tokens": 7}'
    one = begun(tmp_path, f"{judge_server.url}/v1/", prompt=text, request=request)
    one([Answer("a {completion}", "b {kind}", {"kind": "sum"}, False)])
    ((_, body),) = judge_server.asked
    messages = [{"role": "user", "content": "sum | a {completion} | b {kind} | {other}"}]
    assert body == {"model": "m", "messages": messages, "max_completion_tokens": 7}
    assert Server("https://host/v1beta/openai/", None).url == "https://host/v1beta/openai"


CUT = {"message": {"content": "no"}, "finish_reason": "length"}


@pytest.mark.parametrize(
    "faults, verdict, error",
    [
        ([(429, "slowly"), (503, ""), (200, "<html>")], True, None),
        ([(200, json.dumps({"choices": [CUT]}))], None, None),
        ([(401, "no such key")], None, "^judge.server: http.*: 401 Unauthorized: 'no such key'$"),
        ([(500, "")] * 4, None, "4 times 500 Internal Server Error"),
    ],
)
def test_a_busy_or_broken_server_is_asked_again_and_a_refusal_ends_the_run(
    faults, verdict, error, judge_server, tmp_path
):
    judge_server.faults += [(code, {}, text) for code, text in faults]
    one = begun(tmp_path, judge_server.url)
    if error is None:
        assert one(answers("ab")) == [verdict] and not judge_server.faults
        return
    with pytest.raises((BadInput, Failed), match=error):
        one(answers("ab"))
    assert len(judge_server.asked) == len(faults)


def test_the_key_goes_to_the_server_alone(judge_server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("OTHER", "another")
    begun(tmp_path, judge_server.url)(answers("a"))
    begun(tmp_path, judge_server.url, key="OTHER")(answers("b"))
    begun(tmp_path, judge_server.url, key=None)(answers("c"))
    keys = [headers.get("Authorization") for headers, _ in judge_server.asked]
    assert keys == ["Bearer secret", "Bearer another", None]
    assert "secret" not in (tmp_path / "judge.jsonl").read_text()
    # a redirect is not followed: the only request is the one that was redirected
    judge_server.faults += [(302, {"Location": f"{judge_server.url}/elsewhere"}, "")]
    refused("302 Found", begun(tmp_path, judge_server.url), answers("d"))
    assert len(judge_server.asked) == 4


@pytest.mark.parametrize(
    "fault, settings",
    [
        ("server: expected http://HOST:PORT or", {"server": "file:///etc/passwd"}),
        ("server: expected http://HOST:PORT or", {"server": "http://me:secret@host"}),
        ("prompt: expected {completion} in it", {"prompt": "Is it right?"}),
        ("request: Expecting value", {"request": "temperature=0"}),
    ],
)
def test_settings_of_the_judge_that_cannot_be_meant_are_refused(fault, settings):
    refused(f"^judge.{fault}", JudgeSettings, model="m", **settings)


def test_a_run_learns_the_judges_verdicts_and_a_reply_that_is_none_is_no_thumb(
    judge_server, tiny, ratings, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    judge_server.reply_of = lambda question, word: "Hm." if len(question) % 3 == 0 else word
    argv = (*COMMON, f"--judge.server={judge_server.url}", "--judge.model=m",
            "--judge.prompt={completion}", f"--data.val={ratings}", "--eval.prompts=6")  # fmt: skip
    handed = dict(program="online", settings=judge_file.Settings, trainer=Judged, checker=judge)
    train(tiny, ratings, tmp_path, *argv, "--stop_at=3", **handed)
    train(tiny, ratings, tmp_path, *argv, "--resume=auto", **handed)
    asked = [body["messages"][0]["content"] for _, body in judge_server.asked]
    assert len(asked) == len(set(asked)) > 20
    seen = set()
    for i in (1, 2, 3):
        lines = of_iteration(tmp_path, i)
        for line, example in zip(lines, learned(tmp_path, i), strict=True):
            n = len(line["completion"])
            expected = (False, 0.0) if n % 3 == 0 else (n % 2 == 0, 1.0)
            assert (example["label"], example["weight"]) == expected
            seen.add(expected)
    assert len(seen) == 3, "all three happen"
    assert "checker: no verdict on " in capsys.readouterr().out
    assert "secret" not in (tmp_path / "settings.yaml").read_text()


# ---- examples/reward_model.py --------------------------------------------------------------------


def score(folder: Path, dialogue: list[dict], completion: str) -> float:
    """By transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    turns = [*dialogue, {"role": "assistant", "content": completion}]
    text = "".join(f"<{turn['role']}>{turn['content']}\n" for turn in turns)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        return model(ids).logits.item()


@pytest.mark.parametrize("threshold", ["0.125", "median"])
def test_answers_have_the_scores_that_transformers_gives_to_their_dialogues(
    threshold, tiny, reward_folder, tmp_path
):
    fields = {"system": "Be kind.", "completion": "x", "label": True}
    data = tokens.write(tmp_path / "d.jsonl", *({"instruction": f"say {i}"} | fields for i in "ab"))
    template = tmp_path / "t.jinja"  # of the policy: another one than the reward model's
    template.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    argv = (*COMMON, f"--reward.model={reward_folder}", f"--reward.threshold={threshold}",
            "--data.extra=dialogue", f"--data.chat_template={template}", f"--data.val={data}",
            "--online.max_iterations=1", "--eval.prompts=2")  # fmt: skip
    names = dict(settings="Settings", trainer="Rewarded", rate="rate", checker="reward_model")
    names |= dict(make_records="with_dialogue")
    handed = {key: getattr(reward_file, name) for key, name in names.items()}
    train(tiny, data, tmp_path / "run", *argv, program="online", **handed)
    examples = learned(tmp_path / "run", 1)
    scores = []
    for example, line in zip(examples, of_iteration(tmp_path / "run", 1), strict=True):
        dialogue = json.loads(example["extra"]["dialogue"])
        assert [turn["role"] for turn in dialogue] == ["system", "user"]
        scores.append(score(reward_folder, dialogue, line["completion"]))
        assert example["rewards"] == [pytest.approx(scores[-1], abs=1e-6), None]
    limit = float(np.median(scores)) if threshold == "median" else float(threshold)
    assert [e["label"] for e in examples] == [s > limit for s in scores]
    assert 0 < sum(e["label"] for e in examples) < len(examples)


# ---- examples/online_dpo.py ----------------------------------------------------------------------


def test_of_a_prompts_answers_the_best_and_the_worst_are_a_pair(monkeypatch):
    verdicts = [0.5, 1.0, 0.0, True, True, True, None, 0.25, 0.75, None, None, None]
    prompts = [Example(np.array([i]), (), True) for i in range(4) for _ in range(3)]
    ids = [[10 + i, 99] for i in range(12)]
    run = SimpleNamespace(
        cfg=SimpleNamespace(online=SimpleNamespace(num_generations=3, stop=[])),
        evaluator=SimpleNamespace(verdicts=lambda answers: verdicts),
        tokenizer=None,
    )
    monkeypatch.setattr(online_dpo, "as_answers", lambda *_: [])
    first, second = online_dpo.rate(run, prompts, ids)
    assert [list(x) for x in first.completions] == [ids[1], ids[2]]
    assert [list(x) for x in second.completions] == [ids[8], ids[7]]
