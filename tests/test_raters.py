"""Who rates online answers in examples/: a model behind a server, a reward model, the best against the worst."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokens
import torch
import transformers
from conftest import ROOT, train
from test_forks import ONLINE

from evaluation import Answer
from infra.console import BadInput, Failed
from records.examples import Example

sys.path.append(str(ROOT / "examples"))

import judge as judge_file  # noqa: E402
import online_dpo  # noqa: E402
import reward_model as reward_file  # noqa: E402
from judge import Judge, Judged, JudgeSettings, Server, judge, verdict  # noqa: E402
from reward_model import RewardModel  # noqa: E402

COMMON = ("--batch_size=6", "--precision=32-true", "--eval.samples=0", *ONLINE)


def rated(out: Path, i: int) -> list[dict]:
    return [row["example"] for row in rows_in(out / "iterations" / f"rated-{i}.jsonl")]


def rows_in(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines() if line]


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


def chat_reply(content, finish_reason: str = "stop", **message) -> tuple[int, dict, str]:
    """What the server is to answer next: `faults` of judge_server."""
    choice = {"message": {"content": content, **message}, "finish_reason": finish_reason}
    return 200, {}, json.dumps({"choices": [choice]})


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


def test_a_reply_that_was_cut_is_no_verdict_and_is_counted(judge_server, tmp_path, capsys):
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "YES?"}]}
    judge_server.faults += [
        chat_reply("The answer seems right:\nno", "length"),
        chat_reply(
            [thinking, {"type": "text", "text": "Wrong.\n"}, {"type": "text", "text": "NO"}]
        ),
        chat_reply(None, "length", reasoning_content="Let me see"),
    ]
    given = answers("a", "b", "c")
    one = begun(tmp_path, judge_server.url, threads=1)
    line = "judge.request: 2 of 3 replies were cut before their end, so they are no verdicts: "
    for _ in range(2):  # asked, then read from the file
        assert one(given) == [None, False, None]
        assert line + "more max_tokens, or" in capsys.readouterr().out
    assert len(judge_server.asked) == 3
    assert rows_in(tmp_path / "judge.jsonl")[1]["reply"] == "Wrong.\nNO", "without its thoughts"


def test_the_judge_is_asked_once_about_each_answer_also_after_a_kill(judge_server, tmp_path):
    one = begun(tmp_path, judge_server.url)
    assert one(answers("ab", "abc", "ab")) == [True, False, True]
    file = tmp_path / "judge.jsonl"
    file.write_text(file.read_text() + '\n{"request": "ab')  # half a line of a killed process
    again = begun(tmp_path, judge_server.url + "/v1/")  # the same server
    assert again(answers("abc", "abcd", "ab")) == [False, True, True]
    asked = [body["messages"][0]["content"] for _, body in judge_server.asked]
    assert sorted(asked) == ["ab", "abc", "abcd"]
    assert begun(tmp_path, judge_server.url)(answers("abcd")) == [True]
    begun(tmp_path, judge_server.url, model="another")(answers("ab"))
    assert [body["model"] for _, body in judge_server.asked[2:]] == ["m", "another"]


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


@pytest.mark.parametrize(
    "faults, error",
    [
        ([(429, "slowly"), (503, ""), (200, "<html>")], None),
        ([(401, "no such key")], "^judge.server: http.*: 401 Unauthorized: 'no such key'$"),
        ([(500, "")] * 4, "4 times 500 Internal Server Error"),
        ([(200, '{"error": "the quota is used up"}')] * 4, "4 times no reply.*the quota is used"),
    ],
)
def test_a_busy_or_broken_server_is_asked_again_and_a_refusal_ends_the_run(
    faults, error, judge_server, tmp_path
):
    judge_server.faults += [(code, {}, text) for code, text in faults]
    one = begun(tmp_path, judge_server.url)
    if error is None:
        assert one(answers("ab")) == [True]
        assert len(judge_server.asked) == len(faults) + 1
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
    with pytest.raises(BadInput, match="302 Found"):
        begun(tmp_path, judge_server.url)(answers("d"))
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
    with pytest.raises(BadInput, match=f"^judge.{fault}"):
        JudgeSettings(model="m", **settings)


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
        texts = (tmp_path / "iterations" / f"answers-{i}.jsonl").read_text().splitlines()
        for line, example in zip(texts, rated(tmp_path, i), strict=True):
            n = len(json.loads(line)["completion"])
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
    handed = dict(
        settings=reward_file.Settings, trainer=reward_file.Rewarded, rate=reward_file.rate
    )
    handed |= dict(checker=reward_file.reward_model, make_records=reward_file.with_dialogue)
    train(tiny, data, tmp_path / "run", *argv, program="online", **handed)
    examples = rated(tmp_path / "run", 1)
    scores = []
    lines = rows_in(tmp_path / "run" / "iterations" / "answers-1.jsonl")
    for example, line in zip(examples, lines, strict=True):
        dialogue = json.loads(example["extra"]["dialogue"])
        assert [turn["role"] for turn in dialogue] == ["system", "user"]
        scores.append(score(reward_folder, dialogue, line["completion"]))
        assert example["rewards"] == [pytest.approx(scores[-1], abs=1e-6), None]
    limit = float(np.median(scores)) if threshold == "median" else float(threshold)
    assert [e["label"] for e in examples] == [s > limit for s in scores]
    assert 0 < sum(e["label"] for e in examples) < len(examples)
    before = json.loads((tmp_path / "run" / "eval" / "before.json").read_text())
    shift = 0.0 if threshold == "median" else limit
    expected = 0
    for answer in before["answers"]:
        s = score(reward_folder, json.loads(answer["fields"]["dialogue"]), answer["completion"])
        expected += 1 / (1 + np.exp(shift - s))
    assert before["right"] == pytest.approx(expected, abs=1e-6) and before["of"] == 2


def test_what_is_no_reward_model_is_refused(tiny, reward_folder, tmp_path):
    load = reward_file.reward_model.load

    def saved(**changes) -> reward_file.RewardSettings:
        config = transformers.AutoConfig.from_pretrained(reward_folder, **changes)
        transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
        return reward_file.RewardSettings(str(tmp_path))

    with pytest.raises(BadInput, match="^reward.model: .*: no weights of score.weight$"):
        load(reward_file.RewardSettings(str(tiny)), "cpu")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="^reward.model: 2 scores, not one$"):
        load(saved(num_labels=2), "cpu")
    with pytest.raises(BadInput, match="^reward.model: it has no chat template$"):
        load(saved(), "cpu")


def reader(folder: Path, template: str) -> RewardModel:
    """A small reward model with the tokenizer of tiny and this template, as a run of 31 January loads it."""
    shutil.copytree(tokens.FILES, folder, dirs_exist_ok=True)
    sizes = dict(n_positions=40, n_embd=32, n_layer=1, n_head=2, vocab_size=600)
    config = transformers.GPT2Config(**sizes, num_labels=1, pad_token_id=0)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    one = RewardModel()
    one.load(reward_file.RewardSettings(str(folder)), "cpu", "2026-01-31")
    return one


def dialogue(*turns: dict, answer: str) -> Answer:
    return Answer("", answer, {"dialogue": json.dumps(turns)}, False)


USER = {"role": "user", "content": "3 apples, 12 figs"}


def test_a_score_that_is_no_number_and_a_dialogue_that_is_too_long_are_refused(tmp_path):
    one = reader(tmp_path, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    short, long = (dialogue({**USER, "content": "a"}, answer="z!" * n) for n in (19, 20))
    assert [one.encode(x).shape[1] for x in (short, long)] == [39, 41]
    one.scores([short])
    with pytest.raises(BadInput, match="^reward.model: answer 1: 41 tokens .* reads 40: "):
        one.scores([short, long])
    one.model.score.weight.data.fill_(torch.nan)
    with pytest.raises(BadInput, match="^reward.model: answer 0: its score is nan$"):
        one.scores([short])


def test_a_reward_model_reads_the_runs_day_and_no_tools(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    one = reader(tmp_path, template)
    (ids,) = one.encode(dialogue(USER, answer=" a"))
    assert one.tokenizer.decode(ids) == "31 Jan 20263 apples, 12 figs a"
    with pytest.raises(BadInput, match="^tools: the reward model does not read them$"):
        reward_file.with_dialogue({"prompt": "a", "tools": [{"name": "f"}]})


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
    pairs = online_dpo.rate(run, prompts, ids)
    assert [[list(x) for x in e.completions] for e in pairs] == [[ids[1], ids[2]], [ids[8], ids[7]]]
    assert [(e.rewards, e.label) for e in pairs] == [((1.0, 0.0), True), ((0.75, 0.25), True)]


def test_online_dpo_needs_two_answers_to_a_prompt(tiny, ratings, tmp_path):
    argv = (*COMMON, "--online.max_iterations=1", "--online.num_generations=1", "--batch_size=2")
    with pytest.raises(BadInput, match="^online.num_generations: a pair needs two"):
        train(tiny, ratings, tmp_path, *argv, program="online", settings=online_dpo.Settings)
